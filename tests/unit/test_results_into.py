"""Models that were measured anew in the place of those that are kept: which are refused, and that nothing is lost."""

import json
import shutil

import pytest
import results
from benchlib import measured, report, taking

from tests.unit.bench_results import MACHINE, META, STEPS, bench, model, overhead


def put(folder, name, data):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(data))


def test_some_models_are_put_into_what_is_kept(tmp_path):
    taking.store({"bench": bench(model("a", STEPS), model("b", STEPS))}, tmp_path)
    put(
        tmp_path / "new", "bench.json", bench(model("b", STEPS | {"cgpass": 2.5}), commit="7654321")
    )
    new = taking.taken([tmp_path / "new"], "")
    (path,) = taking.store(new, tmp_path, into=True)
    data = json.loads(path.read_text())
    first, second = data["results"]
    for entry in (*first["arms"].values(), *second["arms"].values()):
        entry["step_ms"] |= {"p10": 1.0, "p90": 4.0}
    assert (first["model"], data["meta"]["commit"]) == ("a", META["commit"])
    assert "commit" not in first
    assert (second["commit"], second["arms"]["cgpass"]["step_ms"]["median"]) == ("7654321", 2.5)
    text = report.render(data)
    assert text.count("Commit 7654321, command: `python scripts/bench.py") == 1
    assert text.index("## b, B2") < text.index("Commit 7654321")
    assert measured.commits(data) == f"{META['commit']}; b: 7654321"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (bench(model("b", STEPS), driver="570"), "driver: 570 is not put into results with"),
        (bench(model("b", STEPS)) | {"kind": "memory"}, "kind: memory is not put into"),
        (overhead(), "overhead: holds no models"),
    ],
)
def test_models_that_are_not_put_into_what_is_kept(new, message):
    with pytest.raises(SystemExit, match=message):
        taking.put_into(bench(model("a", STEPS)), new)


def without(arm, entry=None):
    found = model("a", STEPS)
    del found["arms"][arm]
    if entry:
        found["arms"][arm] = entry
    return found


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (model("a", {"cgpass": 2.9}), "bench, a: without default, reduce-overhead, limit, which"),
        (without("limit", {"error": "no"}), "bench, a: without limit, which what is kept has"),
        (without("cgpass"), "bench, a: no figure of cgpass"),
        (without("cgpass", {"error": "no"}), "bench, a: no figure of cgpass"),
        (without("cgpass", {"losses": [1.0]}), "bench, a: no figure of cgpass"),
        (model("a", STEPS, error="the process ended"), "bench, a: stopped by the process ended"),
        (model("new", {}), "bench, new: no figure of cgpass"),
    ],
)
def test_a_model_with_less_than_is_kept_is_refused(tmp_path, new, message):
    (path,) = taking.store({"bench": bench(model("a", STEPS))}, tmp_path)
    before = path.read_text()
    with pytest.raises(SystemExit, match=message):
        taking.store({"bench": bench(new)}, tmp_path, into=True)
    assert path.read_text() == before


def test_what_left_models_out_is_no_whole_result(tmp_path):
    kept = bench(model("a", STEPS), model("b", STEPS))
    (path,) = taking.store({"bench": kept}, tmp_path)
    new = bench(model("a", STEPS | {"cgpass": 1.0}), commit="7654321") | {"left_out": ["b"]}
    with pytest.raises(SystemExit, match="bench: left out, out of time: b; measure them, too, or"):
        taking.store({"bench": new}, tmp_path)
    assert json.loads(path.read_text()) == kept
    taking.store({"bench": new}, tmp_path, into=True)
    data = json.loads(path.read_text())
    assert [each["model"] for each in data["results"]] == ["a", "b"]
    assert "left_out" not in data


def test_what_was_left_out_once_is_not_any_more(tmp_path):
    kept = bench(model("a", STEPS)) | {"left_out": ["b", "c"]}
    assert taking.put_into(kept, bench(model("b", STEPS)))["left_out"] == ["c"]


def test_arms_that_were_left_out_are_not_forgotten_with_several_results():
    def memory(left_out, **arms):
        found = {arm: {"peak_reserved_bytes": value} for arm, value in arms.items()}
        model = {"model": "a", "arms": found}
        return {"kind": "memory", "meta": META, "results": [model], "left_out": left_out}

    other = memory([], cgpass=2) | {"results": [{"model": "b", "arms": {}}]}
    data = taking.merged([memory(["a.cgpass", "a.default"], default=1), other])
    assert data["left_out"] == ["a.cgpass"]


FAILED = [{"name": "tests.unit.test_a::test_b", "message": "no", "seconds": 1}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"ok": False, "failed": FAILED}, "its tests failed: tests.unit.test_a::test_b"),
        ({"ok": True, "failed": FAILED}, "its tests failed: tests.unit.test_a::test_b"),
        ({"ok": False, "failed": [], "passed": 0}, "its tests failed"),
        (
            {"ok": False, "failed": [], "unknown_skips": {"no reason": ["a"]}},
            "its tests failed: skipped, no reason",
        ),
        ({"failed": []}, "its tests failed"),
    ],
)
@pytest.mark.parametrize("part", ["tests", "dist"])
def test_failed_tests_are_neither_kept_nor_in_step(tmp_path, part, data, message):
    directory = tmp_path / "results"
    shutil.copytree(results.RESULTS, directory)
    shutil.copy(results.PERFORMANCE, tmp_path)
    path = directory / f"{part}-{MACHINE}.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({"part": part, "passed": 3} | META | data))
    assert f"{path.name}: {message}" in results.problems(directory, results.README)
    with pytest.raises(SystemExit, match=message):
        taking.taken([path], "")
    path.write_text(json.dumps(kept))
    assert not results.problems(directory, results.README)


@pytest.mark.parametrize("meta", [{"tiny": True}, {"command": "python scripts/bench.py --tiny"}])
def test_tiny_models_are_not_kept(tmp_path, meta):
    put(tmp_path, "bench.json", bench(model("a", STEPS), **meta))
    with pytest.raises(SystemExit, match="measured with tiny models"):
        taking.taken([tmp_path], "")


def test_an_arm_that_failed_before_may_fail_again(tmp_path):
    failed = {"error": "synchronises"}
    taking.store({"bench": bench(without("limit", failed))}, tmp_path)
    new = model("a", STEPS | {"cgpass-lean": 2.0})
    new["arms"]["limit"] = failed
    (path,) = taking.store({"bench": bench(new, commit="7654321")}, tmp_path, into=True)
    assert json.loads(path.read_text())["results"][0]["commit"] == "7654321"


@pytest.mark.parametrize("first", ["bench", "overhead"])
def test_nothing_is_written_where_one_of_several_is_refused(tmp_path, first):
    kept = {"bench": bench(model("a", STEPS)), "overhead": overhead()}
    paths = taking.store(kept, tmp_path)
    before = [path.read_text() for path in paths]
    new = {"bench": bench(model("a", STEPS | {"cgpass": 1.0})), "overhead": overhead()}
    new = {first: new[first]} | new
    with pytest.raises(SystemExit, match="overhead: holds no models"):
        taking.store(new, tmp_path, into=True)
    assert [path.read_text() for path in paths] == before


def test_models_are_put_into_nothing(tmp_path):
    with pytest.raises(SystemExit, match=f"no older bench-{MACHINE}.json into which models"):
        taking.store({"bench": bench(model("a", STEPS))}, tmp_path, into=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--into", "--commit=1234567"])
@pytest.mark.parametrize("what", ["--check", "--write"])
def test_options_of_taking_without_it(monkeypatch, capsys, what, option):
    monkeypatch.setattr(results, "write", None)
    with pytest.raises(SystemExit, match="2"):
        results.main([what, option])
    assert "--into and --commit are about what --take takes" in capsys.readouterr().err
