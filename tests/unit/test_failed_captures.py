"""What is done around failed captures: the checked warm-up, the search for the operator, what a runner does then."""

import pytest
import torch
from torch import fx

from cgpass.compile.culprits import find_culprits
from cgpass.compile.facts.capturability import has_unvetted_ops
from cgpass.errors import CaptureError
from cgpass.runtime.capturing import is_any_capture_running
from cgpass.runtime.failures import Outcome
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runners import COPIED, SYMINT, call, counts, runner

CPU = torch.device("cpu")
aten = torch.ops.aten


@torch.library.custom_op("test_failed::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@torch.library.custom_op("test_failed::refuses", mutates_args=("x",))
def refuses(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    if is_any_capture_running():
        raise ValueError("not now")
    return x * 2


# ---- the search


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
READS = torch.ops.test_failed.reads.default
REFUSES = torch.ops.test_failed.refuses.default


def find(gm, x, trial=True):
    before = x.clone()
    state = torch.get_rng_state()
    finding = find_culprits(gm, [x], SimulatedDriver(), trial=trial)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    return [(node.name, code) for node, (code, _) in finding.culprits.items()], finding.clean


def test_everything_that_waits_is_found_without_a_capture():
    gm = graph_of(SIN, READS, SIN, READS)
    assert find(gm, torch.ones(3), trial=False) == (
        [("reads_default", "syncs"), ("reads_default_1", "syncs")],
        True,
    )


def test_a_trial_finds_the_first_operator_that_fails():
    gm = graph_of(SIN, REFUSES, SIN, REFUSES)
    assert find(gm, torch.ones(3)) == ([("refuses_default", "failed_capture")], True)
    assert find(gm, torch.ones(3), trial=False) == ([], True)


def test_nothing_is_found_where_nothing_is_wrong():
    assert find(graph_of(SIN, aten.rand_like.default), torch.ones(3)) == ([], True)


def test_an_initialisation_that_waits_once_is_no_culprit():
    first = [True]

    @torch.library.custom_op("test_failed::initialises", mutates_args=())
    def initialises(x: torch.Tensor) -> torch.Tensor:
        if first and first.pop():
            x.sum().item()
        return x.clone()

    gm = graph_of(SIN, torch.ops.test_failed.initialises.default)
    assert find(gm, torch.ones(3), trial=False) == ([], True)


def test_what_raises_by_itself_is_no_culprit():
    @torch.library.custom_op("test_failed::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("user's")

    assert find(graph_of(SIN, torch.ops.test_failed.raises.default), torch.ones(3)) == ([], False)


def test_only_operators_that_nobody_looked_at_make_warm_ups_checked():
    assert has_unvetted_ops(graph_of(SIN, READS))
    assert not has_unvetted_ops(graph_of(SIN, aten.mm.default))


# ---- runners


class Blaming:
    """An `OnFailure` that gives what it is told to."""

    checks_warm_ups = False

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


def asking_runner(asked, fn=refusing):
    return runner(fn, COPIED, mutated=(0,), on_failure=asked)


def test_a_runner_says_why_nothing_of_it_is_captured(caplog):
    run = asking_runner(Blaming(Outcome(why="all of it waits")))
    for _ in range(3):
        assert call(run, torch.ones(3)) == [[4.0] * 3]
    assert counts(run) == (1, 0, 0, 2)
    (record,) = caplog.records
    assert "runs without a graph from now on: all of it waits" in record.getMessage()


@pytest.mark.parametrize("error", [CaptureError("no"), KeyError("user's")], ids=str)
def test_a_runner_passes_on_what_is_raised(error):
    run = asking_runner(Blaming(error))
    call(run, torch.ones(3))
    with pytest.raises(type(error)):
        call(run, torch.ones(3))
    assert run._fallback.failure is None


def test_without_memory_a_call_is_recorded_once_more_and_then_again_after_a_reset(caplog):
    """Other calls than those of this key go on being recorded."""
    due = [1, 1]

    def fn(x):
        if due and is_any_capture_running():
            due.pop()
            raise torch.OutOfMemoryError("there was no memory")
        return [x * 2]

    run = runner(lambda x, n: fn(x), COPIED, SYMINT)
    for n in (3, 3, 3, 4, 4, 4):
        assert call(run, torch.ones(3), n) == [[2.0] * 3]
    assert due == []
    assert counts(run) == (2, 1, 2, 2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "forward captured_0: there is no memory to record calls like this one, which run without a graph from now on: "
        "OutOfMemoryError: there was no memory. Free memory, or keep fewer recordings (max_recordings); after "
        "cgpass.reset() the next calls try again."
    )
    run.owner.release()
    for _ in range(3):
        assert call(run, torch.ones(3), 3) == [[2.0] * 3]
    assert counts(run) == (3, 2, 4, 2)


def test_memory_that_is_there_at_the_second_attempt_is_enough(caplog):
    due = [1]

    def fn(x):
        if due and is_any_capture_running():
            due.pop()
            raise torch.OutOfMemoryError("there was no memory")
        return [x * 2]

    run = runner(fn, COPIED)
    for _ in range(3):
        assert call(run, torch.ones(3)) == [[2.0] * 3]
    assert counts(run) == (1, 1, 2, 0)
    assert caplog.records == []


def test_reset_has_a_failed_capture_tried_again():
    due = [True]

    def fn(x):
        return refusing(x) if due else [x + 3]

    asked = Blaming(Outcome(why="all of it waits"))
    run = asking_runner(asked, fn)
    for _ in range(3):
        call(run, torch.ones(3))
    assert counts(run) == (1, 0, 0, 2)
    run.owner.release()
    assert asked.calls[1:] == ["forget"]
    due.clear()
    for _ in range(3):
        assert call(run, torch.ones(3)) == [[4.0] * 3]
    assert counts(run) == (2, 1, 2, 2)


def test_closing_forgets_nothing():
    asked = Blaming(Outcome(why="all of it waits"))
    run = asking_runner(asked)
    for _ in range(2):
        call(run, torch.ones(3))
    run.owner.close()
    assert "forget" not in asked.calls
    assert run._fallback.failure == "all of it waits"


def test_an_odd_error_is_tolerated_once():
    """A wrapper has no graph to search: an error that no capture explains may have been the user's."""
    due = []

    def fn(x):
        if due and is_any_capture_running():
            due.pop()
            raise ValueError("once")
        return [x * 2]

    run = runner(fn, COPIED)
    call(run, torch.ones(2))
    due.append(1)
    assert [call(run, torch.ones(2)) for _ in range(3)] == [[[2.0, 2.0]]] * 3
    assert counts(run) == (1, 1, 2, 1)
