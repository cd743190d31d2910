"""Failed captures: the search for the operator, and the runner's calls afterwards."""

from unittest.mock import Mock

import pytest
import torch
from torch import fx

from cgpass.compile.culprits import find_culprit
from cgpass.errors import CaptureError
from cgpass.runtime import failures
from cgpass.runtime.capturing import is_capturing_here
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from tests.operators import waits
from tests.unit.runtime.runners import COPIED, call, counts, runner

aten = torch.ops.aten


@torch.library.custom_op("test_failed::refuses", mutates_args=("x",))
def refuses(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    if is_capturing_here():
        raise ValueError("not now")
    return x * 2


def graph_of(*targets):
    """x -> targets in a row, each called with the value before."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    value = x
    for target in targets:
        value = graph.call_function(target, (value,))
        value.meta["val"] = torch.empty(3)
    graph.output((value,))
    return fx.GraphModule({}, graph)


SIN = aten.sin.default
WAITS = waits._opoverload
REFUSES = torch.ops.test_failed.refuses.default


def raising(x):
    raise ValueError("user's")


@pytest.mark.parametrize(
    ("targets", "found", "clean"),
    [
        ((SIN, WAITS, SIN, WAITS), "waits_default", False),
        ((SIN, REFUSES, SIN), "refuses_default", False),
        ((SIN, aten.rand_like.default), None, True),
        ((SIN, raising), None, False),
    ],
)
def test_a_trial_finds_the_first_operator_that_fails(targets, found, clean):
    x, state = torch.ones(3), torch.get_rng_state()
    culprit, is_clean = find_culprit(graph_of(*targets), [x], SimulatedDriver())
    assert (culprit and culprit.name, is_clean) == (found, clean)
    assert torch.equal(x, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


class Blaming:
    """An `OnFailure` that gives what it is told to."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.calls = []

    def __call__(self, args, error):
        self.calls.append((args, error))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def forget(self):
        self.calls.append("forget")


def refusing(x):
    return [refuses(x)]


def asking_runner(asked, fn=refusing, **settings):
    return runner(fn, COPIED, mutated=(0,), on_failure=asked, **settings)


@pytest.mark.parametrize(
    ("error", "on_skip", "times"),
    [
        (CaptureError("no"), "warn", 2),
        (CaptureError("no"), "raise", 1),
        (KeyError("own"), "warn", 2),
    ],
)
def test_a_runner_passes_on_what_is_raised(error, on_skip, times):
    """`on_failure` isn't asked again where its refusal is an error."""
    asked = Blaming(error)
    run = asking_runner(asked, on_skip=on_skip)
    call(run, torch.ones(3))
    for _ in range(2):
        with pytest.raises(type(error)):
            call(run, torch.ones(3))
    assert sum(each != "forget" for each in asked.calls) == times
    assert run.failure is None


def test_an_error_that_comes_again_without_a_graph_is_the_users():
    asked, due = Blaming(("why", False)), []

    def fn(x):
        if due:
            raise ValueError("mine")
        return [x * 2]

    run = runner(fn, COPIED, on_failure=asked)
    call(run, torch.ones(2))
    due.append(True)
    with pytest.raises(ValueError, match="mine"):
        call(run, torch.ones(2))
    assert asked.calls[1:] == ["forget"]


def test_memory_that_warm_ups_left_serves_a_second_try():
    class Full(SimulatedDriver):
        is_full = False

        def warm_up(self, fn, args):
            self.is_full = True
            return fn(args)

        def give_back(self):
            self.is_full = False

        def record(self, fn, args, **settings):
            if self.is_full:
                raise torch.OutOfMemoryError("warm-ups have it all")
            return super().record(fn, args, **settings)

    run = runner(lambda x: [x * 2], COPIED, owner=Owner(Full()))
    for _ in range(3):
        call(run, torch.ones(3))
    assert counts(run) == (1, 1, 2, 0)


def test_random_states_are_put_back_though_that_raises_once(monkeypatch):
    """Else a call that can't be recorded again would go on with other random numbers."""
    generators = [Mock(**{"set_state.side_effect": [MemoryError, None]}) for _ in range(2)]
    monkeypatch.setattr(failures, "random_states", lambda *_: [(each, 3) for each in generators])
    with pytest.raises(MemoryError), failures.random_state_kept(torch.device("cpu"), ()):
        pass
    assert [each.set_state.call_count for each in generators] == [2, 2]
