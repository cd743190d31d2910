"""What scripts/gpu_check.sh says of a run of the tests."""

import json
from types import SimpleNamespace

import pytest
from benchlib import check, taking

from tests.conftest import skipped

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one" time="0.5"/>
{more}
</testsuite></testsuites>"""
SKIPPED = (
    '<testcase classname="tests.a" name="test_two" time="0"><skipped message="{}"/></testcase>'
)
FAILED = '<testcase classname="tests.a" name="test_two" time="0"><failure message="no"/></testcase>'
NOT_INSTALLED = "tests/b.py: expecttest is not installed"


def test_tests_that_lack_a_device_are_told_of_in_one_line():
    reasons = [f"needs {n} CUDA device(s), found {n // 4}" for n in (1, 1, 2, 4)]
    reports = [SimpleNamespace(longrepr=("f.py", 1, f"Skipped: {each}")) for each in reasons]
    assert skipped(reports) == {"need a CUDA device": 3, "needs 4 CUDA device(s), found 1": 1}


@pytest.mark.parametrize(
    ("part", "left_out", "good"),
    [
        ("tests", [], False),
        ("dist", [], False),
        ("dist", ["every multigpu test: needs 2 GPUs, found 1"], True),
        ("tests", [NOT_INSTALLED], False),
    ],
)
def test_no_tests_are_a_failure_where_nothing_says_why(tmp_path, part, left_out, good):
    arguments = ["--part", part, "--status", "5", "--out", str(tmp_path / "x.json"), "--left-out"]
    assert (check.main([*arguments, *left_out, "--", str(tmp_path / "none.xml")]) == 0) is good


def checked(tmp_path, *, more="", status=0, left_out=()):
    """Whether it is a success, and what is written."""
    (tmp_path / "tests.xml").write_text(REPORT.format(more=more))
    arguments = ["--part", "tests", "--status", str(status), "--out", str(tmp_path / "tests.json")]
    said = check.main(
        [*arguments, "--left-out", *left_out, "--", str(tmp_path / "tests.xml")],
    )
    return said == 0, json.loads((tmp_path / "tests.json").read_text())


@pytest.mark.parametrize(
    ("given", "good"),
    [
        ({}, True),
        ({"more": SKIPPED.format("needs 2 GPUs, found 1")}, True),
        ({"more": SKIPPED.format("no reason")}, False),
        ({"more": FAILED, "status": 1}, False),
        ({"status": 2}, False),
        ({"left_out": [NOT_INSTALLED]}, True),
        ({"left_out": [NOT_INSTALLED, "tests/c.py: timm is not installed"]}, False),
    ],
)
def test_only_known_gaps_are_no_failure(tmp_path, given, good):
    said, data = checked(tmp_path, **given)
    assert (said, data["ok"], data["passed"]) == (good, good, 1)


def test_files_left_out_for_a_reason_that_is_unknown_are_named(tmp_path, capsys):
    left_out = [NOT_INSTALLED, "tests/c.py: timm is not installed"]
    _, data = checked(tmp_path, left_out=left_out)
    assert data["unknown_skips"] == {"timm is not installed": ["tests/c.py"]}
    assert data["left_out"] == left_out
    said = capsys.readouterr().out
    assert "UNKNOWN SKIP 'timm is not installed': ['tests/c.py']" in said
    assert f"known skip: {NOT_INSTALLED}" in said
    assert "known skip: tests/c.py" not in said


def test_files_left_out_for_a_known_reason_are_kept_with_the_result(tmp_path):
    _, data = checked(tmp_path, left_out=[NOT_INSTALLED])
    data |= {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    (path,) = taking.store({"tests": data}, tmp_path)
    assert json.loads(path.read_text())["left_out"] == [NOT_INSTALLED]
