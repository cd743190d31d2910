"""Runners whose calls ran without a graph, or warm up again and again, for each code of a reason."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import check
from cgpass.report.report import Report
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.telemetry.reason import KEEP_GRADIENTS, NEW, OTHER_FIXES, CallReasons
from tests.report.samples import joined, watched
from tests.unit.runtime.runners import COPIED, POOLED, STATIC, SYMINT, call, runner

X = torch.ones(2)
LINE = "model.py:1 in forward: code"


def chain(x):
    return x.sin().cos().exp().tanh()


def scaled(x, n):
    return [x * n]


def changing(kind, values, **settings):
    run = runner(scaled, COPIED, kind, **settings)
    for value in values:
        call(run, X, value)
    return run


def held():
    run = runner(lambda x: [x * 2, x + 1], COPIED, max_pending_calls=1)
    run.uses = [(True, False), (False, True)]
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
    value = torch.ones(2)
    owner.note_plain_results([value])
    call(second, value)
    return second


def doubled(calls=0, **changes):
    """One whose owner changes after some calls, before another one."""
    run = runner(lambda x: [x * 2], COPIED)
    for _ in range(calls):
        call(run, X)
    vars(run.owner).update(changes)
    call(run, X)
    return run


def captured_by_others():
    driver = SimulatedDriver()
    driver.is_capturing = lambda: True
    return doubled(driver=driver)


def raising():
    def fails(x):
        raise LookupError

    run = runner(fails, COPIED)
    with contextlib.suppress(LookupError):
        call(run, X)
    return run


def sharing():
    run = runner(lambda x, y: [x.add_(1), y * 2], COPIED, COPIED, check_layout=True)
    run.layout.mutated = frozenset({0})
    x = torch.ones(4)
    call(run, x[:2], x[1:3])
    return run


def failing(error):
    def fails(*args, **kwargs):
        raise error

    run = runner(lambda x: [x * 2], COPIED)
    run.owner.driver.record = fails
    for _ in range(4):
        call(run, X)
    return run


CALLS = {
    "max_recordings": (
        lambda: changing(SYMINT, (1, 1, 2, 3, 4), max_recordings=1),
        "3 of 5 calls ran without a graph: max_recordings=1 shapes are recorded, and",
    ),
    "max_pending_calls": (
        held,
        "ran without a graph: results of 1 earlier call were still referenced, as many as max_pending_calls=1 allows",
    ),
    "not_in_the_pool": (
        made_elsewhere,
        "1 of 4 calls ran without a graph: the partition that makes x0 ran without a graph",
    ),
    "transform": (
        lambda: doubled(bypassed="transform"),
        "1 of 1 call ran without a graph: they were made inside a transform",
    ),
    "no_native_code": (
        lambda: doubled(bypassed="no_native_code"),
        "1 of 1 call ran without a graph: recording needs the native code, which is missing",
    ),
    "outer_capture": (
        captured_by_others,
        "1 of 1 call ran without a graph: they ran inside a capture of your own",
    ),
    "raised": (raising, "1 of 1 call did not end: they raised an error, or are still running"),
    "shares_memory": (
        sharing,
        (
            "1 of 1 call ran without a graph: it writes inputs, and these share memory: x0 (read at model.py:0 in forward: "
            "code), x1"
        ),
    ),
    "passing": (
        lambda: doubled(1, closed=True),
        "1 of 2 calls ran without a graph: they could not be recorded just then",
    ),
    "capture": (
        lambda: failing(RuntimeError("operation not permitted when stream is capturing")),
        "ran without a graph: RuntimeError: operation not permitted when stream is capturing",
    ),
    "out_of_memory": (
        lambda: failing(torch.OutOfMemoryError("CUDA out of memory")),
        "3 of 4 calls ran without a graph: OutOfMemoryError: CUDA out of memory",
    ),
    "new_tensor": (
        lambda: changing(STATIC, [torch.ones(2) for _ in range(12)]),
        "is a new tensor in 11 of 12 calls: each such call warms up, or is recorded",
    ),
    "new_shape": (
        lambda: changing(SYMINT, range(12)),
        "has another value or layout in 11 of 12 calls: each such call warms up, or is recorded",
    ),
}
"""Code: what provokes it, and the reason's detail."""
BLAMED = {
    "max_recordings": ("", LINE),
    "not_in_the_pool": ("", "model.py:0 in forward: code"),
    "new_tensor": ("x1", LINE),
    "new_shape": ("x1", LINE),
}
"""Operator and line of those that have them."""


ALONE = {"capture", "out_of_memory", "passing"}
"""Codes that all calls without a graph of such a partition have; an input that can't be copied is tried twice."""


@pytest.mark.parametrize("code", CALLS)
def test_why_calls_ran_without_a_graph(code):
    provoke, detail = CALLS[code]
    run = provoke()
    found = run.reasons.told(dataclasses.asdict(run.stats))
    (reason,) = [each for each in found if each.code == code]
    assert len(found) == 1 or code not in ALONE
    assert (reason.op, reason.line) == BLAMED.get(code, ("", None))
    assert detail in reason.detail
    assert reason.fix == OTHER_FIXES[code]
    passing = sum(each.code == "passing" for each in found if each is not reason)
    without = run.stats.plain_calls - passing or 1  # it raised
    assert code in NEW or f"{without} of " in reason.detail


@pytest.mark.parametrize(
    ("code", "name", "fix"),
    [
        ("new_tensor", "m.weight.grad", KEEP_GRADIENTS),
        ("new_tensor", "m.weight", OTHER_FIXES["new_tensor"]),
        ("new_shape", "x.size(0)", "use few sizes: pad the batch, or drop the last one"),
        ("new_shape", "x.size(1)", "pad dimension 1 of x to a few sizes"),
    ],
)
def test_what_is_new_in_each_call_has_a_remedy_of_its_kind(code, name, fix):
    reasons = CallReasons()
    for _ in range(6):
        reasons.note_changed(code, [("other", None), (name, None)])
    counts = {"calls": 20, "plain_calls": 0, "warmups": 6, "recordings": 1, "replays": 14}
    _, found = reasons.told(counts)
    assert (found.code, found.op) == (code, name)
    assert found.fix.startswith(fix)


def test_recordings_of_calls_that_wait_are_not_told_as_sizes(simulated, counted_alone):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    options = {"max_recordings": 1}
    call = torch.compile(model, backend="cgpass", dynamic=True, options=options)
    for n in (2, 2, 2, 3, 3, 3):  # of which the last are sizes beyond the limit
        call(torch.randn(n, 4)).sum().backward()
    with cgpass.explain() as report:
        losses = [call(torch.randn(2, 4)).sum() for _ in range(3)]
    text = joined(report)
    assert "max_recordings=1 recordings are made, and results of earlier calls are still" in text
    assert len(losses) == 3


def test_a_check_and_a_report_of_all_tell_the_same_share(simulated, counted_alone):
    options = {"max_recordings": 1}
    inner = torch.compile(chain, backend="cgpass", dynamic=True, options=options)
    report = watched(inner, *[torch.randn(n, 4) for n in (2, 3, 4)] * 10)
    assert (report.work, report.plain_calls) == ((36, 108), 18)
    assert Report.from_dict(report.to_dict()) == report
    text = joined(report)
    assert "33.3% of the 108 operators of compiled code ran in graphs, 0 boundaries, 18" in text
    remedy = "pad inputs to a few sizes, drop results, or raise max_recordings"
    assert f"x.size(0) had a new value or layout [max_recordings] Do: {remedy}" in text
    passes, text = check.verdict(report, 0.95)
    assert not passes
    assert "FAILED: 33.3% of the 108 operators that compiled code ran after" in joined(text)
    (line,) = check.fell_back(report)
    assert "captured_0: 18 of 30 calls ran without a graph: max_recordings=" in line
    assert line.endswith(f"[max_recordings]; {remedy}")


def test_copies_are_those_of_the_last_replay(simulated):
    """Not those of the newest recording, which another size made, or a parameter that moved."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)
    compiled = torch.compile(module, backend="cgpass", dynamic=True)
    own = module[0].weight
    for weight in (own, own * 1, own * 2, own * 3):
        module[0].weight = nn.Parameter(weight, requires_grad=False)
        for size in (16, 16, 3, 3):
            compiled(torch.randn(size, 8))
    report = watched(compiled, *[torch.randn(16, 8)] * 4)
    (part,) = report.partitions
    assert [(each.num_bytes, each.moved) for each in part.copied_inputs] == [(16 * 8 * 4, False)]
    assert "copies args[0] (512 B) in every replay" in joined(report)


def test_what_was_graphed_by_hand_says_why_it_was_recorded_again(simulated):
    module = nn.Linear(4, 4)
    graphed = cgpass.make_graphed_callables(
        module, (torch.randn(2, 4),), options={"driver": "simulated"}
    )
    module.weight.data = module.weight.data.clone()
    graphed(torch.randn(2, 4))
    module.requires_grad_(False)
    graphed(torch.randn(2, 4))
    cgpass.reset()
    graphed(torch.randn(2, 4))
    told = cgpass.summary()
    assert "1 recorded: recordings were freed, by reset()" in told
    assert "1 recorded: parameters or buffers moved; write into them in place" in told
    assert "1 recorded: other parameters require gradients" in told
