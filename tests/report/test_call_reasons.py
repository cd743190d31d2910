"""Why calls of what was captured ran without a graph: every such code is provoked, and says what to do."""

import pytest
import torch
from torch import nn

import cgpass
from cgpass.reason import NEW, OTHER_FIXES, CallReasons
from cgpass.report import check
from cgpass.report.collect import snapshot
from cgpass.runtime.failures import Outcome
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runners import COPIED, POOLED, STATIC, SYMINT, call, runner

X = torch.ones(2)
LINE = "model.py:1 in forward: code"


def scaled(x, n):
    return [x * n]


def too_many_shapes():
    run = runner(scaled, COPIED, SYMINT, max_recordings=1)
    for n in (1, 1, 2, 3, 4):
        call(run, X, n)
    return run


def too_many_sets():
    run = runner(scaled, COPIED, STATIC, settings={"other_sets": True}, max_static_sets=1)
    for weight in [torch.ones(2) for _ in range(3)] * 2:
        call(run, X, weight)
    return run


def moved_too_often():
    run = runner(scaled, COPIED, STATIC, max_rerecords=1)
    weight, kept = torch.zeros(2), []
    for _ in range(2):
        call(run, X, weight)
    for _ in range(4):
        kept.append(weight.data)
        weight.data = weight.data.clone()
        call(run, X, weight)
    return run


def held():
    run = runner(
        lambda x: [x * 2, x + 1], COPIED, owner=Owner(SimulatedDriver(), max_pending_calls=1)
    )
    run.visible, run.read = frozenset({0}), frozenset({1})
    kept = [run.run([torch.ones(2)])[0] for _ in range(6)]
    assert len(kept) == 6
    return run


def made_elsewhere():
    owner = Owner(SimulatedDriver())
    first = runner(lambda x: [x * 2], COPIED, owner=owner)
    second = runner(lambda h: [h + 1], POOLED, owner=owner)
    for _ in range(3):
        outputs, _ = first.run([torch.ones(2)])
        call(second, *outputs)
    del outputs
    call(second, torch.ones(2))
    return second


def transformed():
    run = runner(lambda x: [x * 2], COPIED)
    run.owner.bypassed = True
    call(run, X)
    return run


def captured_by_others():
    run = runner(lambda x: [x * 2], COPIED)
    run.owner.driver.is_capturing = lambda: True
    call(run, X)
    return run


def of_a_size_that_parts_are_not_made_for():
    def fails(args):
        raise RuntimeError("operation not permitted when stream is capturing")

    run = runner(
        lambda x: [x * 2], COPIED, resplit=Split(Outcome(lambda args: [args[0] * 2], covers=no))
    )
    run.owner.driver.record = fails
    for _ in range(3):
        call(run, X)
    return run


def no(args):
    return False


class Split:
    """Stands for what splits a partition."""

    checks_warm_ups = False

    def __init__(self, outcome):
        self.outcome = outcome

    def __call__(self, args, error):
        return self.outcome


def put_off():
    run = runner(lambda x: [x * 2], COPIED)
    call(run, X)
    run.owner.closed = True
    call(run, X)
    return run


def failed():
    def fails(*args, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing")

    run = runner(lambda x: [x * 2], COPIED)
    run.owner.driver.record = fails
    for _ in range(4):
        call(run, X)
    return run


def replaced():
    run = runner(scaled, COPIED, STATIC)
    kept = [torch.ones(2) for _ in range(12)]
    for weight in kept:
        call(run, X, weight)
    return run


def of_a_new_shape_each():
    run = runner(scaled, COPIED, SYMINT)
    for n in range(12):
        call(run, X, n)
    return run


# Code: what provokes it, the reason's operator, line and detail.
CALLS = {
    "max_recordings": (
        too_many_shapes,
        "",
        LINE,
        (
            "3 of 5 calls ran without a graph: as many shapes are recorded as max_recordings=1 allows, and another value or "
            "layout of x1 came"
        ),
    ),
    "max_static_sets": (
        too_many_sets,
        "",
        LINE,
        (
            "ran without a graph: as many sets of parameters and buffers are recorded as max_static_sets=1 allows, and x1 lay "
            "elsewhere"
        ),
    ),
    "max_rerecords": (
        moved_too_often,
        "",
        LINE,
        "3 of 6 calls ran without a graph: x1 moved, and was recorded anew for that as often as max_rerecords=1 allows",
    ),
    "max_pending_calls": (
        held,
        "",
        None,
        "ran without a graph: results of 1 earlier call were held, as many as max_pending_calls=1 allows",
    ),
    "not_in_the_pool": (
        made_elsewhere,
        "",
        "model.py:0 in forward: code",
        (
            "1 of 4 calls ran without a graph: x0 (read at model.py:0 in forward: code) lay where no recording had put it: "
            "made without a graph, or moved since"
        ),
    ),
    "transform": (
        transformed,
        "",
        None,
        "1 of 1 call ran without a graph: they came from inside of a transform",
    ),
    "outer_capture": (
        captured_by_others,
        "",
        None,
        "1 of 1 call ran without a graph: somebody else captured a graph of them",
    ),
    "other_sizes": (
        of_a_size_that_parts_are_not_made_for,
        "",
        None,
        "ran without a graph: the kernels of its parts are not made for inputs of such sizes ([(2,)])",
    ),
    "passing": (
        put_off,
        "",
        None,
        "1 of 2 calls ran without a graph: they could not be recorded just then",
    ),
    "capture": (
        failed,
        "",
        None,
        "ran without a graph: RuntimeError: operation not permitted when stream is capturing",
    ),
    "new_tensor": (
        replaced,
        "x1",
        LINE,
        "is a new tensor in 11 of 12 calls: such calls warm up, or are recorded each",
    ),
    "new_shape": (
        of_a_new_shape_each,
        "x1",
        LINE,
        "has another value or layout in 11 of 12 calls: such calls warm up, or are recorded each",
    ),
}


def told(run):
    stats = run.stats
    return run.reasons.told(
        calls=stats.calls,
        plain_calls=stats.plain_calls,
        warmups=stats.warmups,
        recordings=stats.recordings,
    )


@pytest.mark.parametrize("code", CALLS)
def test_why_calls_ran_without_a_graph(code):
    provoke, op, line, detail = CALLS[code]
    run = provoke()
    (reason,) = [each for each in told(run) if each.code == code]
    assert (reason.op, reason.line) == (op, line)
    assert detail in reason.detail
    assert reason.fix == OTHER_FIXES[code]
    assert code in NEW or f"{run.stats.plain_calls} of " in reason.detail


def test_new_gradients_are_told_how_to_stay():
    reasons = CallReasons()
    for _ in range(6):
        reasons.note_changed("new_tensor", [("L['m'].weight.grad", None), ("L['m'].weight", None)])
    grad, weight = reasons.told(calls=20, plain_calls=0, warmups=6, recordings=1)
    assert (grad.code, weight.code) == ("new_tensor", "new_tensor")
    assert grad.fix.startswith("keep gradients where they lie: zero_grad(set_to_none=False)")
    assert weight.fix == OTHER_FIXES["new_tensor"]


def test_what_replays_has_no_reasons_however_it_began():
    run = runner(scaled, COPIED, STATIC, settings={"other_sets": True})
    for weight in [torch.ones(2) for _ in range(30)] * 3:
        call(run, X, weight)
    assert run.stats.recordings == 30
    assert told(run) == ()


def test_what_is_copied_from_now_on_is_told_no_more():
    run = runner(scaled, COPIED, STATIC, settings={"other_sets": True})
    kept = [torch.ones(2) for _ in range(300)]
    for weight in kept:
        call(run, X, weight)
    assert told(run) == ()


@pytest.fixture
def simulated():
    torch.compiler.reset()
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent"):
        yield
    torch.compiler.reset()


def joined(text):
    return " ".join(str(text).split())


def limited():
    return torch.compile(
        lambda x: x.sin().cos().exp().tanh(),
        backend="cgpass",
        dynamic=True,
        options={"max_recordings": 1},
    )


def test_percentages_leave_out_calls_that_ran_without_a_graph(simulated):
    inner = limited()
    report = cgpass.explain(
        lambda x: sum(inner(x[:n]).sum() for n in (2, 3, 4)), torch.randn(4, 4), training=False
    )
    assert report.settled
    assert report.work == (4, 12)
    text = joined(report)
    assert "in graphs: 33.3% of the 12 operators of compiled functions" in text
    assert "1 of 1 partition captured, 33.3% of 4 operators, 30 calls" in text
    assert (
        "some calls 18 of 30 calls ran without a graph: as many shapes are recorded as max_recordings=1 allows, and "
        "another value or layout of L['x'].size()[0] came [max_recordings] fix: pad inputs to a few sizes, or raise "
        "max_recordings"
    ) in text
    assert cgpass.Report.from_dict(report.to_dict()) == report


def test_a_saved_report_and_its_check_tell_the_same_share(simulated, monkeypatch):
    monkeypatch.setattr(cgpass.telemetry, "_registry", cgpass.telemetry._Registry())
    inner = limited()
    for _ in range(10):
        for n in (2, 3, 4):
            inner(torch.randn(n, 4))
    report, work = snapshot(), check.work_done()
    assert report.work == (work.captured, work.total) == (36, 108)
    assert (
        "in graphs: 33.3% of the 108 operators that compiled functions ran after their warm-ups"
        in joined(report)
    )
    (line,) = work.fell_back
    assert "captured_0: 18 of 30 calls ran without a graph: as many shapes are recorded" in line
    assert line.endswith("[max_recordings]; pad inputs to a few sizes, or raise max_recordings")


def test_backwards_of_forwards_that_ran_without_a_graph_say_so(simulated):
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    model = torch.compile(layers, backend="cgpass", options={"max_pending_calls": 1})
    report = cgpass.explain(lambda x: sum(model(x * i).sum() for i in range(3)), torch.randn(4, 8))
    forward, backward = report.graphs
    assert [reason.code for reason in forward.partitions[0].reasons] == ["max_pending_calls"]
    assert "not_in_the_pool" in [reason.code for reason in backward.partitions[0].reasons]
    done, work = report.work
    assert done < work
    assert "raise max_pending_calls" in joined(report)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = torch.zeros(4, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.k = self.k + x
        return (self.k * self.weight).sin().cos().exp().tanh()


def test_a_cache_that_each_call_replaces_is_named(simulated):
    model, kept = Cache(), []
    compiled = torch.compile(model, backend="cgpass")

    def calls(x):
        compiled(x)
        kept.append(model.k)  # the next one can't lie where it does

    report = cgpass.explain(calls, torch.randn(4, 8), training=False)
    assert not report.settled
    assert "warmed up; see the causes below" in joined(report)
    (part,) = report.graphs[0].partitions
    (reason,) = part.reasons
    line = Cache.forward.__code__.co_firstlineno + 1
    assert (reason.code, reason.op) == ("new_tensor", "L['self'].k")
    assert reason.line == f"test_call_reasons.py:{line} in forward: self.k = self.k + x"
    assert reason.detail.startswith("is a new tensor in ")
    assert reason.fix == "write into it in place (copy_) instead of replacing it"


def test_a_recording_for_other_tensors_names_them():
    run = runner(lambda x, w, v: [x * w * v], COPIED, STATIC, STATIC)
    weight = torch.ones(2)
    one, two = torch.ones(2), torch.ones(2)
    for other in (one, two, one, two):
        call(run, X, weight, other)
    assert [note.detail for note in run.history.notes if note.cause == "other tensors"] == [
        "the first call with this tensor for x2 (read at model.py:2 in forward: code)"
    ]
