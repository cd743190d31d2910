"""Reports as text, in files, as a page that loads nothing, and what changed between two."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpass import __main__ as command
from cgpass.errors import ReportError
from cgpass.report.model import CopiedInput
from cgpass.report.report import Report, diff, html
from cgpass.report.text import NOTHING, findings, headline, milliseconds, share, size, what
from cgpass.telemetry.reason import OTHER_FIXES, Reason
from tests.report.samples import READ, joined, of_parts, sample


def test_it_is_kept_in_files(tmp_path):
    report = sample()
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report
    report.save(tmp_path / "r.txt")
    assert (tmp_path / "r.txt").read_text() == str(report)
    with pytest.raises(ReportError, match=r"a report is saved as \.json, \.html, \.txt, got"):
        report.save(tmp_path / "r.pdf")


def test_it_is_kept_behind_a_link_and_with_names_that_are_no_unicode(tmp_path):
    report = sample()
    report.command = "train\udcff.py"
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    report.save(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "train\\udcff.py" in (tmp_path / "page.html").read_text()


def test_copies_are_counted_of_graphs_that_are_gone_too():
    text = str(of_parts({"copied_inputs": (), "output_bytes": None}))
    (row,) = [line.split() for line in text.splitlines() if line.startswith("    captured_0 ")]
    assert row == ["captured_0", "graph", "40", "29", "26", "3.0", "MiB", "2", "0.750", "ms"]
    assert "a recording takes 7.875 ms" in text


def test_alike_reasons_are_told_apart_by_their_code_and_counted():
    def read(*lines):
        reasons = (Reason("host_sync", "op", "it reads", "pass min=", f"m.py:{x}") for x in lines)
        return sample(graph_breaks=tuple(reasons))

    both, left = read("7 in f: histc(x)", "9 in f: histc(y)"), read("7 in f: histc(y)")
    assert diff(both, left).splitlines()[1:] == [
        "gone: m.py:7 in f: histc(x): op: it reads [host_sync]; pass min="
    ]
    assert "new: m.py:7 in f: histc(x): op: it reads" in diff(left, both)
    both, left = read("7 in f: histc(x)", "9 in f: histc(x)"), read("9 in f: histc(x)")
    assert "gone: m.py:7 in f: histc(x)" in diff(both, left)
    assert "new: m.py:7 in f: histc(x)" in diff(left, both)


def test_of_many_recordings_the_oldest_are_not_noted():
    assert "at least 1 recording: " in str(of_parts({"counts": {"recordings": 99}}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "this is not a report of cgpass"),
        ({}, "this is not a report of cgpass \\(KeyError: 'schema'\\)"),
        ({"schema": 1, "cgpass": "0.0.1"}, "read it with the version that wrote it"),
        ({**sample().to_dict(), "nothing": 1}, "unexpected keyword argument 'nothing'"),
        ({**sample().to_dict(), "graphs": [3]}, "this is not a report of cgpass"),
    ],
)
def test_what_is_no_report(data, message):
    with pytest.raises(ReportError, match=message):
        Report.from_dict(data)


def test_files_that_are_no_reports(tmp_path, capsys):
    path = tmp_path / "r.json"
    wrong = "{", "[" * 99999
    for text, message in [(None, "can't be read"), *((each, "is not JSON") for each in wrong)]:
        if text is not None:
            path.write_text(text)
        assert command.main(["report", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_page_is_made_beside_the_report(tmp_path, capsys):
    sample().save(tmp_path / "r.json")
    assert command.main(["report", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert command.main(["report", str(tmp_path / "r.json"), "-o", "-"]) == 0
    assert capsys.readouterr().out == f"{sample()}\n"
    elsewhere = str(tmp_path / "no" / "r.html")
    assert command.main(["report", str(tmp_path / "r.json"), "-o", elsewhere]) == 2
    assert "to save the report in does not exist" in capsys.readouterr().err


def test_the_headline_comes_first_and_then_what_costs_most():
    report = sample()
    lines = str(report).splitlines()
    assert lines[0] == (
        "60% of the device time was inside graphs, 3 boundaries, 3 calls without a graph"
    )
    assert "a call takes 1.500 ms with graphs, 4.500 ms without (3.00 times as long)" in lines
    begin = lines.index("What costs most:")
    assert lines[begin + 1] == "  1. model.py:59 in g runs in eager because of model.py:60 in g"
    assert lines[begin + 4] == "  2. model.py:50 in f: graph break: print [graph_break]"
    text = joined(report)
    assert f"waits for the device [host_read] Do: {READ}" in text
    assert "it uses several devices: cuda:0, cuda:1 Do: use one" in text
    assert "1 recording: weight (float32[8, 8]) moved from 0x7f00 to 0x7f80" in text
    assert "outputs still referenced were copied 2 times" in text
    assert "aten.cos.default: its partition would hold 1 operator" in text
    assert all(each.fix for each in findings(report))


@pytest.mark.parametrize("text", ["", " and more of it" * 12, "x" * 130])
def test_it_has_at_most_100_columns(text):
    assert max(map(len, str(sample(text)).splitlines())) <= 100


def test_what_is_to_be_left_comes_last_and_what_is_alike_is_counted():
    again = Reason("host_sync", "aten.histc.default", "reads", "pass min= and max=", "a.py:2 in f")
    report = of_parts(*[{"captured": False, "reasons": (again,)}] * 3)
    report.left_to_eager, (noted,) = (), report.graph_breaks
    report.graph_breaks = (dataclasses.replace(noted, fix="leave it: it has its own graphs"),)
    found = findings(report)
    assert (found[0].line, found[0].count) == ("a.py:2 in f", 3)
    assert found[-1].line == noted.line


def test_parameters_that_moved_at_one_line_are_one_finding():
    """As `load_state_dict(assign=True)` moves all of them."""
    moved = tuple(
        CopiedInput(name=f"layers.{n}.weight", num_bytes=2048, line="a.py:1 in f", moved=True)
        for n in range(14)
    )
    report = of_parts({"copied_inputs": moved})
    (found,) = [each for each in findings(report) if each.line == "a.py:1 in f"]
    assert found.op.startswith("layers.0.weight (2.0 KiB), layers.1.weight (2.0 KiB), ")
    assert found.op.endswith(", layers.11.weight (2.0 KiB), and 2 more")
    assert found.fix == OTHER_FIXES["new_tensor"]
    assert "a.py:1 in f layers.0.weight" in joined(report)
    assert "reads 10 static inputs in place" in joined(report)


def test_a_report_of_nothing():
    none = {"graphs": (), "graph_breaks": (), "left_to_eager": ()}
    empty = sample(**none, graphs_ms=None, device_ms=None)
    assert headline(empty) == NOTHING
    assert NOTHING in page(empty).text
    assert "torch.compiler.disable" in NOTHING
    assert "(nn.Sequential) inside DistributedDataParallel or FSDP" in NOTHING
    broken = dataclasses.replace(empty, graph_breaks=sample().graph_breaks)
    assert headline(broken).startswith("nothing ran in graphs, 1 boundary, ")
    steps = dataclasses.replace(empty, others=("train_step of f: 3 calls",))
    assert headline(steps).startswith("only training steps")
    assert "train_step of f: 3 calls" in str(steps)


def test_what_changed_is_told(tmp_path, capsys):
    old, new = sample(), sample(graph_breaks=(), torch="2.12.0", ms=1.0, graphs_ms=1.0)
    new.native, new.pool_bytes = "in use", 1 << 20
    new.counters = {**old.counters, "copied_bytes": 7, "rescues": 2}
    assert diff(old, old) == "nothing changed"
    assert diff(old, new).splitlines() == [
        "torch: 2.11.0+cu130 -> 2.12.0",
        "native code: - -> in use",
        "device time inside graphs: 60% -> 80%",
        "boundaries: 3 -> 2",
        "a call with graphs: 1.500 ms -> 1.000 ms",
        "memory pools: 96.0 MiB -> 1.0 MiB",
        "copied_bytes: 78.0 MiB -> 7 B",
        "rescues: 0 -> 2",
        "gone: model.py:50 in f: graph break: print [graph_break]; remove it",
    ]
    more = sample(graphs=(dataclasses.replace(old.graphs[0], num_ops=99), *old.graphs[1:]))
    assert "operators of graphs: " in diff(old, more)
    assert diff(new, old).splitlines()[-1].startswith("new: model.py:50 in f: graph break")
    one, two = (f"f, graphed by hand: {n} recordings\n  1 recorded: why" for n in (1, 2))
    assert diff(sample(others=(one,)), sample(others=(two,))) == "nothing changed"
    assert diff(old, sample(others=(one,))) == "new: f: 1 recorded: why"
    for name, report in (("old", old), ("new", new)):
        report.save(tmp_path / f"{name}.json")
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    assert command.main(["report", "--diff", *paths]) == 0
    assert "boundaries: 3 -> 2\n" in capsys.readouterr().out
    assert command.main(["report", "--diff", paths[0]]) == 2
    assert "report --diff old.json new.json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["report", "--diff", *paths, "-o", str(tmp_path / "diff.txt")])
    assert "-o/--output: not allowed with argument --diff" in capsys.readouterr().err


def test_results_that_are_held_and_parameters_that_move_are_changes():
    held, free = of_parts({}), of_parts({"counts": {"recordings": 2}, "recordings": ()})
    told = joined(diff(free, held))
    assert "captured_0: outputs still referenced were copied 2 times (0 B) [rescues]; drop" in told
    assert "captured_0: 1 recording: weight (float32[8, 8]) moved from" in told
    assert told.count("new: ") == 2
    assert joined(diff(held, free)).count("gone: ") == 2


@pytest.mark.parametrize(
    "changes",
    [
        [{}, {"line": "model.py:51 in f"}, {"is_earlier": True}],
        [
            {"detail": f"{calls} ran without a graph: why"}
            for calls in ("1 of 1 call", "4 of 5 calls")
        ],
        [{"detail": f"s == {number}"} for number in ("0.5", "-0.5", "4.9e-06")],
        [{"detail": f"captured_{number}: held"} for number in (4, 0)],
    ],
    ids=["moved or noted before", "more calls", "another sign or size", "another partition"],
)
def test_one_cause_otherwise_is_no_change(changes):
    (noted,) = sample().graph_breaks
    old, *new, other = (
        sample(graph_breaks=(dataclasses.replace(noted, **change),))
        for change in (*changes, {**changes[-1], "detail": "another cause"})
    )
    assert {diff(old, each) for each in new} == {"nothing changed"}
    assert "another cause" in diff(old, other)


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_a_share_says_all_and_nothing_only_of_these(part, whole):
    part = min(part, whole)
    assert (share(part, whole) == "100%") is (part == whole)
    assert (share(part, whole) == "0%") is (part == 0)


def test_numbers():
    assert [size(n) for n in (None, 0, 1023, 1024, 3 << 20, (1 << 30) - 1)] == [
        "-", "0 B", "1023 B", "1.0 KiB", "3.0 MiB", "1.0 GiB",
    ]  # fmt: skip
    assert [milliseconds(ms) for ms in (None, 0.1234, 12.34)] == ["-", "0.123 ms", "12.3 ms"]


# ---- the page


class Parsed(HTMLParser):
    """Tags, attributes and text of a page; fails where tags don't match."""

    VOID = ("meta", "link", "br")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], "", []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(report):
    return Parsed(html(report))


def test_it_says_what_the_text_says():
    report = sample()
    found = " ".join(page(report).text.split())
    for each in findings(report):
        for words in (each.line, what(each), each.fix):
            assert " ".join(words.split()) in found
    about = "NVIDIA H200", "2026-01-01 12:00", "train.py", "model.py:38 in forward"
    numbers = "96.0 MiB", "3.0 MiB", "0.750 ms", "moved from 0x7f00 to 0x7f80"
    for words in (headline(report), *about, *numbers):
        assert words in found


def test_what_users_wrote_is_text():
    nasty = '<script>alert("x")</script><img src=x onerror=y>\'"&'
    found = page(sample(nasty))
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.text.count("<script>alert") > 8


def test_it_needs_nothing_else():
    text = html(sample())
    assert not re.findall(r"https?://|@import|url\(|<script|src=", text)
    found = page(sample())
    assert [value for name, value in found.attributes if name == "href"] == ["data:,"]


def test_bars_are_as_long_as_times_or_operators():
    report = sample()
    widths = [value for name, value in page(report).attributes if name == "style"]
    assert widths == ["flex-grow:0.75", "flex-grow:0.25"]
    report = of_parts({"device_ms": None}, {"device_ms": None, "num_ops": 3})
    widths = [value for name, value in page(report).attributes if name == "style"]
    assert widths == ["flex-grow:40", "flex-grow:3"]
