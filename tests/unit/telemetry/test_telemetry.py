"""Totals outlive what was counted; summaries name places, reasons and what was turned off."""

import dataclasses
import logging

import pytest

from cgpass import telemetry
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, counted

pytestmark = pytest.mark.usefixtures("counted_alone")


def test_counts_stay_in_the_totals_when_their_owners_are_gone():
    stats = telemetry.CallStats()
    telemetry.registry.counts.append(stats)
    stats.calls, stats.replays = 5, 4
    del stats
    telemetry.CallStats(calls=3)  # nobody registered it
    totals = telemetry.counters()
    assert (totals["calls"], totals["replays"]) == (5, 4)


def test_a_reason_of_several_operators_names_all_of_them_and_no_single_line():
    one = Reason("too_small", "aten.sin.default", "it is small", "leave it", "m.py:1")
    (found,) = counted([one, dataclasses.replace(one, op="aten.cos.default", line="m.py:2"), one])
    ops = "aten.sin.default, aten.cos.default"
    assert (found.op, found.line, found.count) == (ops, None, 3)
    assert counted([found, found])[0].op == ops


def test_a_skip_is_counted_for_as_long_as_it_lasts():
    parts = (
        PartitionSummary("captured_0", True, 4),
        PartitionSummary("eager_1", False, 2, (Reason("syncs", "", "it waits", ""),)),
        PartitionSummary("eager_2", False, 1, (Reason("too_small", "", "small", ""),)),
    )
    graph = telemetry.add_graph(GraphSummary("forward", parts))
    assert telemetry.counters()["skips"] == 1
    failed = PartitionSummary("captured_0", False, 4, (Reason("out_of_memory", "", "", ""),))
    graph.replace(failed)
    assert telemetry.counters()["skips"] == 2
    graph.replace(parts[0])
    assert telemetry.counters()["skips"] == 1


def test_a_function_that_was_compiled_again_is_listed_once():
    part = PartitionSummary("captured_0", True, 4)
    for function, direction in ((0, "forward"), (1, "inference"), (0, "backward")):
        telemetry.add_graph(GraphSummary(direction, (part,), function=function))
    telemetry.remove_function(0)
    assert [graph.summary.direction for graph in telemetry.graphs()] == ["inference"]
    counters = telemetry.counters()
    assert (counters["graphs"], counters["partitions_captured"]) == (3, 1)


def test_reasons_are_counted_and_what_nobody_wants_captured_comes_last():
    small = Reason("too_small", "aten.t", "its partition would hold 2 operators", "set it to 1")
    reads = Reason("host_read", "aten.item", "reads", "keep it")
    elsewhere = dataclasses.replace(small, line="model.py:9")
    found = counted([small, reads, elsewhere, reads])
    assert [(each.code, each.count) for each in found] == [("host_read", 2), ("too_small", 2)]
    assert counted(found) == found


log = logging.getLogger("cgpass.somewhere")


@pytest.fixture
def bare(monkeypatch):
    """Takes all handlers away, as in a program that did not set up logging; pytest sets its own up after fixtures."""
    return lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_a_warning_begins_with_our_name(bare, capsys):
    bare()
    log.warning("the %s graph runs without CUDA graphs", "forward")
    log.warning("cgpass.verify: it says so itself")
    log.info("this is not printed")
    assert capsys.readouterr().err == (
        "cgpass: the forward graph runs without CUDA graphs\ncgpass.verify: it says so itself\n"
    )


@pytest.mark.parametrize("name", ["", "cgpass"])
def test_other_handlers_are_left_to_it(bare, capsys, monkeypatch, name):
    bare()
    taken = []
    handler = logging.Handler()
    handler.emit = taken.append
    theirs = logging.getLogger(name)
    monkeypatch.setattr(theirs, "handlers", [*theirs.handlers, handler])
    log.warning("once")
    assert (len(taken), capsys.readouterr().err) == (1, "")
