"""Recorded code that sets the default generator itself: refused where a replay would draw other numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cgpass.runtime.simulated import SimulatedDriver

OUTSIDE = torch.get_rng_state()


X = torch.ones(8)


def record(fn):
    return SimulatedDriver().record(lambda inputs: fn(*inputs), [X], opaque=False)


def checkpointed(x, p):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = checkpoint(lambda v: F.dropout(v.sin(), p).cos(), x, use_reentrant=False)
        (F.dropout(y, 0.5).sum()).backward()
    return [y.detach(), x.grad]


def drawn_from(state):
    torch.set_rng_state(state)
    return [torch.rand(2)]


def left_at(state):
    torch.set_rng_state(state)
    return [torch.ones(2) + 1]


def read_by_an_operator():
    torch.set_rng_state(OUTSIDE)
    return [torch.ops.cgpass.read_rng_state(torch.default_generator)]


def seeded_first(seed):
    torch.rand(2)
    seed()
    return [torch.rand(2)]


DRAWS = "rand.default draws from a state that was set in what is recorded"


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x: drawn_from(OUTSIDE), DRAWS),
        (lambda x: left_at(OUTSIDE), "set_rng_state without setting it back"),
        (lambda x: read_by_an_operator(), "read_rng_state.default draws from a state"),
        (lambda x: seeded_first(lambda: torch.manual_seed(8)), DRAWS),
        (lambda x: seeded_first(torch.seed), DRAWS),
        (lambda x: checkpointed(x, 0.5), "Recompute by cgpass.checkpoint"),
    ],
)
def test_what_no_replay_repeats_is_refused_and_the_generator_stays(fn, why):
    torch.manual_seed(7)
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=f"not permitted when stream is capturing: .*{why}"):
        record(fn)
    assert torch.equal(torch.get_rng_state(), before)


@torch.library.custom_op("cgpass_test::seeded", mutates_args=())
def seeded(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    torch.manual_seed(5)
    drawn = torch.rand_like(x)
    torch.set_rng_state(state)
    return drawn


def back_before_anything_draws(x):
    first, state = torch.rand_like(x), torch.get_rng_state()
    torch.set_rng_state(OUTSIDE)
    y = x + 1
    torch.set_rng_state(state)
    return [y, first, torch.rand_like(x)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [seeded(x), torch.rand_like(x)],  # inside an operator, which a replay runs again
        lambda x: checkpointed(x, 0.0),
        back_before_anything_draws,
    ],
)
def test_what_a_replay_repeats_is_recorded(fn):
    graph, outputs = record(fn)
    for seed in range(3):
        torch.manual_seed(seed)
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3)]
        torch.manual_seed(seed)
        for a, b in zip(found, [*fn(X), torch.rand(3)], strict=True):
            assert torch.equal(a, b)
