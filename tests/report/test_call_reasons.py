"""Reasons of plain calls: every code of a captured partition is provoked, and says what to do."""

import dataclasses

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import check
from cgpass.report.report import Report
from cgpass.telemetry.reason import NEW, OTHER_FIXES, CallReasons
from tests.report.calls import BLAMED, CALLS
from tests.report.samples import joined


def told(run):
    return run.reasons.told(dataclasses.asdict(run.stats))


ALONE = {"capture", "out_of_memory", "passing"}
"""Codes that all calls without a graph of such a partition have; an input that can't be copied is tried twice."""


@pytest.mark.parametrize("code", CALLS)
def test_why_calls_ran_without_a_graph(code):
    provoke, detail = CALLS[code]
    run = provoke()
    found = told(run)
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
        (
            "new_tensor",
            "m.weight.grad",
            "keep gradients in place with zero_grad(set_to_none=False)",
        ),
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


def limited():
    return torch.compile(
        lambda x: x.sin().cos().exp().tanh(),
        backend="cgpass",
        dynamic=True,
        options={"max_recordings": 1},
    )


def test_a_check_and_a_report_of_all_tell_the_same_share(simulated, counted_alone):
    inner = limited()
    with cgpass.explain() as report:
        for _ in range(10):
            for n in (2, 3, 4):
                inner(torch.randn(n, 4))
    assert (report.work, report.plain_calls) == ((36, 108), 18)
    assert Report.from_dict(report.to_dict()) == report
    text = joined(report)
    assert (
        "33.3% of the 108 operators of compiled functions ran in graphs, 0 boundaries, 18" in text
    )
    assert (
        "x.size(0) had a new value or layout [max_recordings] Do: pad inputs to a few sizes, or raise"
        in text
    )
    passes, text = check.verdict(report, 0.95)
    assert not passes
    assert "FAILED: 33.3% of the 108 operators that compiled functions ran after" in joined(text)
    (line,) = check.fell_back(report)
    assert "captured_0: 18 of 30 calls ran without a graph: max_recordings=" in line
    assert line.endswith("[max_recordings]; pad inputs to a few sizes, or raise max_recordings")


def test_warm_ups_are_no_calls_without_a_graph(simulated):
    inner = torch.compile(lambda x: x.sin().cos().exp().tanh(), backend="cgpass", dynamic=True)
    inner(torch.randn(2, 4))
    with cgpass.explain() as report:
        for n in range(3, 13):
            inner(torch.randn(n, 4))
    assert report.counters["warmups"] == 10
    assert report.plain_calls == 0


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = torch.zeros(4, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.k = self.k + x
        return (self.k * self.weight).sin().cos().exp().tanh()


def test_a_cache_that_each_call_replaces_is_copied_and_named(simulated):
    report = cgpass.explain(Cache(), torch.randn(4, 8), training=False)
    (part,) = report.graphs[0].partitions
    assert not part.reasons
    line = Cache.forward.__code__.co_firstlineno + 1
    copied = {each.name: each for each in part.copied_inputs}
    assert copied.keys() == {"self.k", "x"}
    assert copied["self.k"].line == f"test_call_reasons.py:{line} in forward: self.k = self.k + x"
