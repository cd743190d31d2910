"""Reports as dictionaries, JSON and files."""

import copy
import json

import pytest

import cgpass
from cgpass.errors import ReportError
from tests.report.samples import sample


def test_a_report_survives_json():
    report = sample()
    data = report.to_dict()
    assert data["schema"] == 1
    assert cgpass.Report.from_dict(json.loads(report.to_json())) == report
    assert cgpass.Report.from_dict(data) == report
    assert data == report.to_dict()


def test_what_is_not_known_may_be_left_out():
    data = json.loads(sample().to_json())
    del data["gpu_share"], data["functions"][0]["pool_bytes"]
    report = cgpass.Report.from_dict(data)
    assert report.gpu_share is None
    assert report.functions[0].pool_bytes is None


def test_later_versions_may_say_more():
    assert cgpass.Report.from_dict(sample().to_dict() | {"new": 1}) == sample()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "this is no report of cgpass"),
        ({"functions": []}, "this is no report of cgpass"),
        (
            {"schema": 2, "cgpass": "9.0"},
            r"schema 2, this version of cgpass reads schema 1: .*9\.0",
        ),
        ({"schema": 1}, "report lacks something"),
    ],
)
def test_what_is_no_report(data, message):
    with pytest.raises(ReportError, match=message):
        cgpass.Report.from_dict(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("torch",), 3, "report.torch is to be of type str, got 3"),
        (("functions",), 3, "report.functions is to be of type tuple"),
        (("functions", 0), "x", r"report.functions\[0\] is to be a dictionary"),
        (("functions", 0, "graphs", 0, "calls"), None, r"graphs\[0\].calls is to be of type int"),
    ],
)
def test_what_is_broken_is_named(path, value, message):
    data = copy.deepcopy(json.loads(sample().to_json()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ReportError, match=message):
        cgpass.Report.from_dict(data)


def test_the_ending_of_a_file_says_what_is_written(tmp_path):
    report = sample()
    for ending in ("json", "html", "txt"):
        report.save(tmp_path / f"report.{ending}")
    read = {path.suffix: path.read_text() for path in tmp_path.iterdir()}
    assert json.loads(read[".json"])["torch"] == "2.11.0+cu130"
    assert read[".html"].startswith("<!doctype html>")
    assert read[".txt"] == str(report)
    with pytest.raises(ReportError, match=r"a report is saved as .json, .html, .txt, got 'x.pdf'"):
        report.save("x.pdf")


def test_shares_count_kernels_where_they_are_known():
    report = sample()
    assert (report.counted, report.work) == ("kernels", (12, 18))


def test_shares_count_operators_else_as_often_as_they_run():
    data = json.loads(sample().to_json())
    for graph in data["functions"][0]["graphs"]:
        graph["kernels"] = None
        for part in graph["partitions"]:
            part["kernels"] = None
    report = cgpass.Report.from_dict(data)
    assert (report.counted, report.work) == ("operators", (12 * 40, 12 * 43 + 2))
