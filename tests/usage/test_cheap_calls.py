"""Calls are cheap: a settled loop only replays, and copies its inputs and nothing else."""

import pytest

from tests.usage import programs
from tests.usage.programs import MLP, Block, ConvNet, Tied, assert_steady, gradients, noting

MODELS = {
    "mlp": (MLP, programs.rows(4, 8)),
    "transformer block": (Block, programs.rows(2, 6, 16)),
    "batch norm": (ConvNet, programs.rows(2, 3, 8, 8)),
    "tied weights": (Tied, programs.tokens(16, 2, 5)),
}


@pytest.mark.parametrize("model", MODELS)
def test_training_replays_every_step_but_the_first(setting, model):
    counters = setting.compare(programs.trained(*MODELS[model]))
    assert_steady(counters, captured=2)
    assert counters["calls"] == 12


def plain_loop(*, dropped):
    """Nothing of a step is held in the next one's forward, or its gradients until the backward."""

    def program(session):
        module, call = session.compiled(MLP)
        for batch in session.batches(4, 8, count=16):
            if dropped == "before":
                module.zero_grad()
            loss = call(batch).square().mean()
            if dropped == "between":
                module.zero_grad()
            loss.backward()
            found = [loss.detach(), *gradients(module)]
            del loss
            yield found
            found.clear()

    return program


NEEDED = 3 * 4 * 8 * 4
"""Bytes of a batch, which forward and backward read, and of the gradient of its output."""


@pytest.mark.parametrize("dropped", ["before", "between"])
def test_the_plain_training_loop_copies_nothing_but_inputs(setting, dropped):
    found = []
    setting.compare(noting(plain_loop(dropped=dropped), setting.driver, found))
    expected = {"rescues": 0, "rescued_bytes": 0, "recordings": 0, "plain_calls": 0}
    expected |= {"replays": 2, "copied_bytes": NEEDED}
    assert [{name: step[name] for name in expected} for step in found[9:]] == [expected] * 7
