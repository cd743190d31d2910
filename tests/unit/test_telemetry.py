"""Totals outlive what was counted; summaries name places, reasons and what was turned off."""

import dataclasses
import gc

import pytest

import cgpass
from cgpass import telemetry
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, counted


@pytest.fixture(scope="module")
def collected():
    """What others left for the garbage collector is not counted here."""
    for _ in range(3):  # what finalizers let go of is garbage of the next time
        gc.collect()


@pytest.fixture
def registry(monkeypatch, collected):
    """An empty one."""
    del collected
    monkeypatch.setattr(telemetry, "_registry", telemetry._Registry())
    monkeypatch.setattr(telemetry, "compile_stats", telemetry._registry.compiled)
    return telemetry._registry


def test_counts_stay_in_the_totals_and_their_owners_do_not(registry):
    for _ in range(1000):
        stats = telemetry.new_call_stats()
        stats.calls += 2
        stats.replays += 1
        del stats
    live = telemetry.new_call_stats()
    live.calls += 5
    gc.collect()
    totals = telemetry.counters()
    assert (totals["calls"], totals["replays"]) == (2005, 1000)
    assert len(registry.calls) == 1
    assert not registry.ended
    live.calls += 1
    assert telemetry.counters()["calls"] == 2006
    del live
    assert telemetry.counters()["calls"] == 2006


def test_counts_of_a_partition_that_is_gone_are_known_as_long_as_its_graph_is_listed(registry):
    stats = telemetry.new_call_stats()
    run = telemetry.PartitionRun(stats, ())
    stats.calls, stats.replays = 5, 4
    del stats
    gc.collect()
    assert (run.stats.calls, run.stats.replays) == (5, 4)
    del run
    gc.collect()
    assert telemetry.counters()["calls"] == 5
    assert registry.calls == []


def test_counts_that_nobody_registered_are_not_added(registry):
    telemetry.CallStats(calls=3)
    gc.collect()
    assert telemetry.counters()["calls"] == 0


def test_only_the_newest_graphs_are_listed(registry, monkeypatch):
    monkeypatch.setattr(telemetry, "GRAPHS_KEPT", 3)
    part = PartitionSummary("captured_0", True, 4)
    numbers = [telemetry.add_graph(GraphSummary(f"graph{i}", (part,))) for i in range(5)]
    assert numbers == [0, 1, 2, 3, 4]
    assert [graph.direction for graph in telemetry.graphs()] == ["graph2", "graph3", "graph4"]
    assert [graph.direction for graph in telemetry.graphs(since=4)] == ["graph4"]
    assert cgpass.summary().startswith("2 older graphs\ngraph2: 1 partition captured (4 operators)")
    assert telemetry.counters()["graphs"] == telemetry.counters()["partitions_captured"] == 5
    telemetry.replace_partition(0, PartitionSummary("captured_0", False, 4))
    assert telemetry.counters()["partitions_captured"] == 5


def test_a_skip_is_counted_for_as_long_as_it_lasts(registry):
    parts = (
        PartitionSummary("captured_0", True, 4),
        PartitionSummary("eager_1", False, 2, (Reason("syncs", "", "it waits", ""),)),
        PartitionSummary("eager_2", False, 1, (Reason("too_small", "", "small", ""),)),
    )
    graph = telemetry.add_graph(GraphSummary("forward", parts))
    assert telemetry.counters()["skips"] == 1
    failed = PartitionSummary("captured_0", False, 4, (Reason("out_of_memory", "", "", ""),))
    telemetry.replace_partition(graph, failed)
    assert telemetry.counters()["skips"] == 2
    telemetry.replace_partition(graph, parts[0])
    assert telemetry.counters()["skips"] == 1


def test_a_function_that_was_compiled_again_is_listed_once(registry):
    part = PartitionSummary("captured_0", True, 4)
    for function, direction in ((0, "forward"), (1, "inference"), (0, "backward")):
        telemetry.add_graph(GraphSummary(direction, (part,), function=function))
    telemetry.remove_function(0)
    assert [graph.direction for graph in telemetry.graphs()] == ["inference"]
    counters = telemetry.counters()
    assert (counters["graphs"], counters["partitions_captured"]) == (3, 1)


def test_a_graph_says_where_the_function_begins():
    place = "model.py:41 in forward"
    told = "0 partitions captured (0 operators), 0 eager (0 operators)"
    assert str(GraphSummary("forward", (), place=place)) == f"forward of {place}: {told}"
    skipped = GraphSummary("backward", (), skip="no", num_ops=7)
    assert str(skipped) == "backward: runs without CUDA graphs (7 operators): no"


def test_reasons_are_counted_and_what_nobody_wants_captured_comes_last():
    small = Reason("too_small", "aten.t", "its partition would hold 2 operators", "set it to 1")
    reads = Reason("host_read", "aten.item", "reads", "keep it")
    elsewhere = dataclasses.replace(small, line="model.py:9")
    found = counted([small, reads, elsewhere, reads])
    assert [(each.code, each.count) for each in found] == [("host_read", 2), ("too_small", 2)]
    assert counted(found) == found
