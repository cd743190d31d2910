"""Results that are kept, what is shown of them, and summaries of tests."""

import json

import pytest
import results
from benchlib import check

from tests.unit.scripts.test_bench import EQUAL, META, arm, result, usual

MARKS = "head\n<!-- {0}: begin -->\nold\n<!-- {0}: end -->\ntail\n"
TIME = {"time": "2026-01-01 00:00:00"}


@pytest.fixture
def places(tmp_path):
    directory = tmp_path / "results"
    directory.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(MARKS.format("measured"))
    return directory, readme


def kept(directory, part, data):
    path = directory / f"{part}-h200-torch2.11.json"
    path.write_text(json.dumps(data | {"meta": data["meta"] | TIME}))


def written(places):
    for path, text in results.texts(*places).items():
        path.write_text(text)


def test_what_is_committed_is_in_step():
    assert results.main(["--check"]) == 0


def test_documents_show_what_is_kept(places):
    directory, readme = places
    both = usual(4.123, peak_reserved_bytes=90)
    both["default"]["peak_reserved_bytes"] = 100
    kept(directory, "bench", result(both))
    calls = {
        "default": arm(0.2),
        "reduce-overhead": arm(0.2),
        "cgpass": arm(0.1, check={"equal": False}),
    }
    kept(directory, "inference", result(calls, "inference"))
    written(places)
    text = readme.read_text()
    assert text.startswith("head\n")
    assert text.endswith("tail\n")
    assert "| GPT-2 | 15.00 | 4.12 | 3.50 | 0.90 |" in text
    assert "| GPT-2 | 100 | 100 | 50 (differs) |" in text
    assert "[training steps](docs/results/bench-h200-torch2.11.md)," in text
    assert "All figures of commit abc, " in text
    assert (directory / "steps-h200-torch2.11.svg").exists()
    assert results.problems(*places) == ["inference: GPT-2, inference, cgpass: results differ"]


def test_what_is_out_of_step_or_of_no_result_is_named(places):
    directory = places[0]
    kept(directory, "bench", result(usual()))
    written(places)
    assert results.problems(*places) == []
    (directory / "old.md").write_text("")
    kept(directory, "bench", result(usual(4.5)))
    *said, old = results.problems(*places)
    again = " is out of step: run scripts/results.py --write"
    assert [each.removesuffix(again) for each in said] == [
        "bench-h200-torch2.11.md",
        "steps-h200-torch2.11.svg",
        "README.md",
    ]
    assert old == "old.md is of no result: remove it"


def test_results_of_two_runs_are_merged_and_kept(tmp_path, places):
    other = result({"cgpass": arm(5.0, **EQUAL)})
    other["results"][0] |= {"model": "bert", "title": "BERT"}
    for name, data in (("a", result(usual()) | {"left_out": ["bert, train"]}), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench.json").write_text(json.dumps(data))
    (path,) = results.take([tmp_path / "a", tmp_path / "b"], places[0])
    assert path.name == "bench-h200-torch2.11.json"
    assert [each["model"] for each in json.loads(path.read_text())["results"]] == ["gpt2", "bert"]
    assert results.merged(other, other)["meta"]["command"] == "; ".join([META["command"]] * 2)
    less = results.merged(other, other | {"left_out": ["vit, train"]})
    assert results.refused("bench", less) == ["bench: left out, out of time: vit, train"]
    with pytest.raises(SystemExit, match="of different commits or machines"):
        results.merged(other, other | {"meta": META | {"commit": "def"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meta": META | {"tiny": True}}, "bench: tiny models"),
        ({"meta": META | {"commit": ""}}, "bench: of no commit: set BENCH_COMMIT"),
        ({"results": []}, "bench: no results"),
        ({"left_out": ["bert, train"]}, "bench: left out, out of time: bert, train"),
        ({"failed": [{"name": "x"}], "ok": False}, "bench: tests failed"),
    ],
)
def test_what_is_refused(tmp_path, places, change, message):
    (tmp_path / "bench.json").write_text(json.dumps(result(usual()) | change))
    with pytest.raises(SystemExit) as error:
        results.take([tmp_path], places[0])
    assert str(error.value).splitlines() == ["nothing is kept:", message]
    assert not list(places[0].iterdir())


@pytest.mark.parametrize(
    ("cases", "status", "good"),
    [("psk", 0, True), ("pf", 1, False), ("s", 0, False), ("p", 2, False), ("", 5, False)],
)
def test_summaries_of_tests(tmp_path, capsys, cases, status, good):
    kinds = {"p": "", "f": '<failure message="no"/>'} | dict.fromkeys(
        "sk", '<skipped message="x"/>'
    )
    report, out = tmp_path / "report.xml", tmp_path / "tests.json"
    lines = [f'<testcase classname="a" name="{c}">{kinds[c]}</testcase>' for c in cases]
    report.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    given = ["--part", "tests", "--status", str(status), "--out", str(out), str(report)]
    assert (check.main(given) == 0) is good
    data = json.loads(out.read_text())
    assert (data["ok"], data["passed"]) == (good, cases.count("p"))
    assert sum(data["skipped"].values()) == sum(map(cases.count, "sk"))
    assert [each["name"] for each in data["failed"]] == ["a::f"] * cases.count("f")
    assert f"tests: {'ok' if good else 'FAILED'}, " in capsys.readouterr().out
