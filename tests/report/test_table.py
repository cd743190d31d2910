"""Reports as text."""

import dataclasses

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from cgpass.report import words
from cgpass.report.model import PartitionReport, ReasonReport, Report
from cgpass.report.page import html
from tests.report.samples import sample


def test_text():
    assert_expected_inline(
        str(sample()),
        """\
cgpass 0.1.0, torch 2.11.0+cu130, NVIDIA H200
one call: 1.500 ms with CUDA graphs, 4.500 ms without: graphs take 0.33x the time
in graphs: 66.7% of the 18 kernels of compiled functions, 90% of the call's GPU time
graph breaks at 1 line (no known line): what runs there, outside of compiled functions, is not among
  these kernels

function 0: model.py:38 in forward
  its graphs' memory pools: 96.0 MiB
  forward: 1 of 2 partitions captured, 93% of 43 operators, 30 calls, 12 in each call of what was
    explained, 1.000 ms (plain 3.750)
    partition                  runs    ops kernels  replays     copied recorded       ms plain ms
    captured_0                graph     40      12       26    3.0 MiB        5    0.750    3.500
    eager_1                   plain      3       4        -          -        -    0.250    0.250
    captured_0:
      copies in every replay: x (3.0 MiB), mask (100 B)
      reads 24 static inputs in place (parameters, buffers, marked ones); outputs 5.0 MiB; outputs
        still referenced were copied 2 times (0 B); 3 calls without a graph
      3 older recordings
      recording 4 (8.500 ms, instantiate 1.500, warm-up 20.0): first: the first call after the
        warm-up
      recording 5 (7.250 ms, pool 1): moved: weight (float32[8, 8]) moved from 0x7f00 to 0x7f80
    eager_1:
      aten._local_scalar_dense.default at model.py:41 in forward: scale = x.max().item()
        the host reads a tensor's data and waits for the device [host_read]
        fix: keep the value on the device (torch.where, tensor arithmetic) instead of item()
      aten.cos.default (2 times)
        its partition would hold 1 operator that does work on the device (views don't count),
          min_partition_ops is 4 [too_small]
        fix: set min_partition_ops to 1 to capture it
  backward: runs without CUDA graphs, 2 operators, 30 calls
    why: it uses several devices: cuda:0, cuda:1
  ends at a graph break: print
    fix: leave it out""",
    )


def test_reasons_that_say_the_same_are_together():
    def reason(op, line, count=1, code="unbacked_size"):
        detail, fix = "a size depends on data", "use a form with a fixed size"
        return ReasonReport(code=code, op=op, detail=detail, fix=fix, line=line, count=count)

    first, other = reason("aten.cos", "a.py:1 in f: x.cos()"), reason("aten.max", None, code="sync")
    same = [reason("aten.mm", "a.py:2 in f: x @ y", 3), reason("aten.sin", None)]
    assert words.alike([first, other, *same]) == [[first, *same], [other]]
    assert [*map(words.briefly, same)] == ["aten.mm (a.py:2, 3 times)", "aten.sin"]


NASTY = ["x" * 300, "two\nlines\tand tabs", "word " * 80, "<b>&amp;\"'", "", "  ", "a-b" * 99]


@pytest.mark.parametrize("text", NASTY)
def test_no_line_is_wider_than_100_columns(text):
    lines = str(sample(text)).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=200), st.integers(0, 10**15), st.floats(0, 1e12))
def test_no_line_is_wider_whatever_the_numbers(text, number, ms):
    report = sample(text, ms=ms, plain_ms=ms * 3)
    part = report.functions[0].graphs[0].partitions[0]
    for name in part.counts:
        part.counts[name] = number
    assert max(map(len, str(report).splitlines())) <= 100


def test_sizes():
    sizes = [0, 1023, 1024, 1536, 1024**2 - 1, 3 << 30, 5 << 40, 5 << 60]
    found = [words.size(number) for number in sizes]
    assert found[:4] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB"]
    assert found[4:] == ["1.0 MiB", "3.0 GiB", "5.0 TiB", "5242880.0 TiB"]


def test_shares_never_round_to_what_is_not_so():
    pairs = [(0, 0), (0, 5), (1, 10**6), (1, 3), (10**6 - 1, 10**6), (5, 5)]
    found = [words.share(*pair) for pair in pairs]
    assert found == ["-", "0%", "0.1%", "33.3%", "99.9%", "100%"]


def test_of_many_recordings_those_in_between_are_counted_by_cause():
    report = sample()
    (graph, *graphs) = report.functions[0].graphs
    part = next(each for each in graph.partitions if each.captured)
    causes = ["first", *["other tensors"] * 40, "shape", *["other tensors"] * 8]
    made = tuple(
        dataclasses.replace(part.recordings[0], cause=cause, detail=f"number {n}")
        for n, cause in enumerate(causes, 1)
    )

    def shown(recordings):
        counts = part.counts | {"recordings": len(recordings)}
        changed = dataclasses.replace(part, recordings=recordings, counts=counts)
        function = dataclasses.replace(
            report.functions[0],
            graphs=(dataclasses.replace(graph, partitions=(changed,)), *graphs),
        )
        text = str(dataclasses.replace(report, functions=(function,)))
        return [line.strip() for line in text.splitlines() if line.strip().startswith("recording")]

    first, *others = shown(made)
    assert first.startswith("recording 1 (8.500 ms")
    assert "recordings 4 to 48: other tensors 44 times, shape 1 time" in others[2]
    assert [line.split(" (")[0] for line in others[3:]] == ["recording 49", "recording 50"]
    assert len(shown(made[:6])) == 6


def test_what_gone_recordings_copied_is_not_known():
    gone = PartitionReport(name="captured_0", captured=True, num_ops=4, counts={"replays": 9})
    assert words.copied_bytes(gone) is None
    assert words.copied_bytes(dataclasses.replace(gone, live_recordings=1)) == 0


def test_nothing_in_graphs_is_no_faster():
    report = Report(
        cgpass="1", torch="2", device="cpu", functions=(), ms=1.0, plain_ms=2.0, settled=False
    )
    assert str(report).splitlines()[1] == "one call: 1.000 ms"
    assert "2.00x" not in html(report)
    assert words.unsettled(report) == "calls went on recording or compiling"
