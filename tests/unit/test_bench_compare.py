"""Two results of a benchmark: what got worse by itself, and what only the machine changed."""

import argparse
import copy
import json

import bench
import bench_overhead
import pytest
import results
from benchlib import compare

META = {
    "torch": "2.11.0",
    "gpu": "NVIDIA H200",
    "driver": "580",
    "commit": "1234567",
    "command": "",
    "parallel": 1,
}


def timed(scale=1.0, name="time", **steps):
    """Results of one model, all times scaled as by another machine."""
    arms = {
        arm.replace("_", "-"): {
            "step_ms": dict.fromkeys(("median", "p10", "p90"), ms * scale),
            "host_ms": {"median": ms * scale / 2},
        }
        for arm, ms in steps.items()
    }
    if "cgpass" in arms:
        arms["cgpass"]["check"] = {"equal": True, "deterministic": False}
    model = {"model": "small", "title": "Small, B2", "arms": arms}
    return {"kind": name, "meta": META, "results": [model]}


OLD = timed(default=8.0, reduce_overhead=4.2, cgpass=4.0, limit=3.5)


def memory(**mebibytes):
    arms = {arm: {"peak_reserved_bytes": mib << 20} for arm, mib in mebibytes.items()}
    return {"kind": "memory", "meta": META, "results": [{"model": "small", "arms": arms}]}


def overhead(**us):
    row = {"layers": 10, "mode": "training", "us": {k.replace("_", "-"): v for k, v in us.items()}}
    return {"kind": "overhead", "meta": META, "rows": [row]}


def worse(old, new, tolerance=5.0):
    return compare.compare(old, new, tolerance).worse


def test_another_machine_is_no_regression():
    slower = timed(1.8, default=8.0, reduce_overhead=4.2, cgpass=4.0, limit=3.5)
    found = compare.compare(OLD, slower, 5.0)
    assert (found.worse, found.judged) == ([], 2)


def test_ratios_that_got_worse_are_named():
    new = timed(1.8, default=8.0, reduce_overhead=4.2, cgpass=4.3, limit=3.5)
    assert worse(OLD, new) == [
        "Small, B2, step ms, cgpass / limit: 1.14 -> 1.23 (+7.5 %)",
        "Small, B2, host ms, cgpass / reduce-overhead: 0.95 -> 1.02 (+7.5 %)",
    ]
    assert worse(OLD, new, tolerance=8.0) == []


def test_cgpass_that_fails_or_differs_is_worse():
    new = timed(default=8.0, reduce_overhead=4.2, limit=3.5)
    new["results"][0]["arms"]["cgpass"] = {"error": "RuntimeError: no"}
    assert worse(OLD, new) == [
        "Small, B2, step ms, cgpass: measured before, not now",
        "Small, B2, host ms, cgpass: measured before, not now",
        "Small, B2, cgpass: failed",
    ]
    new = timed(default=8.0, reduce_overhead=4.2, cgpass=4.0, limit=3.5)
    new["results"][0]["arms"]["cgpass"]["check"] = {"equal": False}
    assert worse(OLD, new) == ["Small, B2, cgpass: losses differ"]
    assert worse(new, new) == []
    notes = compare.compare(new, new, 5.0).notes
    assert notes == ["Small, B2, cgpass: losses differ, as before"]


def test_memory_is_judged_by_itself():
    old, new = memory(default=800, cgpass=800), memory(default=1000, cgpass=900)
    assert worse(old, new) == ["small, peak reserved MiB, cgpass: 800.00 -> 900.00 (+12.5 %)"]
    assert worse(new, old) == []


def test_overhead_is_judged_by_reduce_overhead():
    old = overhead(default=900.0, reduce_overhead=400.0, cgpass=300.0, cgpass_direct=200.0)
    new = overhead(default=100.0, reduce_overhead=800.0, cgpass=600.0, cgpass_direct=500.0)
    assert worse(old, new) == [
        "training, 10 layers, us, cgpass-direct / reduce-overhead: 0.50 -> 0.62 (+25.0 %)"
    ]


def against(old, new, models=None, layers=None, arms=None):
    args = argparse.Namespace(compare=old, tolerance=5.0, models=models, layers=layers, arms=arms)
    return compare.against(args, new)


def test_what_is_printed(capsys):
    new = timed(default=8.0, reduce_overhead=4.2, cgpass=4.3)
    del new["results"][0]["arms"]["reduce-overhead"]["host_ms"]
    new["results"].append({"model": "other", "arms": {"eager": {"step_ms": {"median": 1.0}}}})
    assert against(OLD, new)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Before: torch 2.11.0, NVIDIA H200, commit 1234567."
    assert "| Small, B2 | limit | 3.50 -> - **gone** | 1.75 -> - **gone** |" in shown
    assert "| Small, B2 | cgpass | 4.00 -> 4.30 (+7.5 %) | 2.00 -> 2.15 (+7.5 %) |" in shown
    line = "| Small, B2 | cgpass / reduce-overhead | {0} **worse** | - |"
    assert line.format("0.952 -> 1.024 (+7.5 %)") in shown
    line = "| Small, B2 | cgpass / default | {0} | {0} **worse** |"
    assert line.format("0.500 -> 0.537 (+7.5 %)") in shown
    assert "other: only in the newer result" in shown
    assert "Worse (tolerance 5 %), 5:" in shown


def test_nothing_to_judge_is_no_success(capsys):
    assert against(overhead(eager=9.0, cgpass=3.0), overhead(eager=9.0, cgpass=3.0))
    assert "Nothing to judge" in capsys.readouterr().out
    assert not against(OLD, OLD)


def test_results_of_different_kinds():
    with pytest.raises(ValueError, match="memory before, time now"):
        compare.compare(memory(cgpass=1), OLD, 5.0)


def test_models_that_are_gone_are_worse(capsys):
    both = timed(default=8.0, reduce_overhead=4.2, cgpass=4.0, limit=3.5)
    both["results"] += [{"model": "other", "arms": OLD["results"][0]["arms"]}]
    assert worse(both, OLD) == ["other: measured before, not now"]
    assert worse(OLD, both) == []
    assert not against(both, OLD, models=["small"])
    assert "other" not in capsys.readouterr().out
    both["results"][1] = {"model": "other", "arms": {"default": {"step_ms": {"median": 1.0}}}}
    assert worse(both, OLD) == ["other: measured before, not now"]
    both["results"][1] = {"model": "other", "arms": {}, "error": "no"}
    found = compare.compare(both, OLD, 5.0)
    assert (found.worse, found.notes) == ([], ["other: only in the older result, without figures"])


@pytest.mark.parametrize("arm", ["limit", "reduce-overhead", "cgpass-lean", "cgpass"])
def test_arms_that_are_gone_are_worse(arm, capsys):
    whole = {"default": 8.0, "reduce_overhead": 4.2, "cgpass": 4.0, "limit": 3.5}
    old = timed(**whole, cgpass_lean=3.9)
    old["results"][0]["arms"]["cgpass-lean"]["check"] = {"equal": True, "deterministic": False}
    new = copy.deepcopy(old)
    del new["results"][0]["arms"][arm]
    lost = [f"Small, B2, {what} ms, {arm}: measured before, not now" for what in ("step", "host")]
    assert worse(old, new) == lost
    new["results"][0]["arms"][arm] = {"error": "the process ended"}
    assert worse(old, new)[:2] == lost
    assert not against(old, old)
    assert against(old, new, arms=[arm])
    del new["results"][0]["arms"][arm]
    others = [name for name in old["results"][0]["arms"] if name != arm]
    assert not against(old, new, arms=others)
    capsys.readouterr()
    assert worse(memory(cgpass=1, default=1), memory(cgpass=1)) == [
        "small, peak reserved MiB, default: measured before, not now"
    ]


def test_arms_of_stacks_that_are_gone_are_worse(capsys):
    old = overhead(reduce_overhead=4.0, cgpass=3.0, cgpass_direct=2.0)
    new = overhead(reduce_overhead=4.0, cgpass=3.0)
    said = "training, 10 layers, us, cgpass-direct: measured before, not now"
    assert worse(old, new) == [said]
    assert against(old, new)
    assert f"- {said}" in capsys.readouterr().out.splitlines()
    assert not against(old, new, arms=["reduce-overhead", "cgpass"])


def test_losses_that_are_not_compared_any_more_are_worse():
    new = copy.deepcopy(OLD)
    del new["results"][0]["arms"]["cgpass"]["check"]
    said = "Small, B2, cgpass: losses not compared bitwise"
    assert worse(OLD, new) == [said]
    assert compare.compare(new, new, 5.0).notes == [f"{said}, as before"]


def test_figures_that_have_nothing_to_be_judged_by_any_more_are_worse():
    both, alone = OLD["results"][0], timed(cgpass=4.0)["results"][0] | {"title": "alone"}
    new = OLD | {"results": [both, alone]}
    old = OLD | {"results": [both, both | {"title": "alone"}]}
    assert [said for said in worse(old, new) if "step" in said] == [
        f"alone, step ms, {rival}: measured before, not now"
        for rival in ("default", "reduce-overhead", "limit")
    ]
    assert worse(new, new) == []


def test_depths_that_are_gone_are_worse():
    deep, flat = (overhead(reduce_overhead=4.0, cgpass=3.0) for _ in range(2))
    deep["rows"] += [deep["rows"][0] | {"layers": 100}]
    assert worse(deep, flat) == ["training, 100 layers: measured before, not now"]
    assert not against(deep, flat, layers=[10])


def of_a_model(**more):
    return OLD | {"results": [{"model": "a"} | more]}


def of_an_arm(**entry):
    return of_a_model(arms={"cgpass": entry})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "it has no rows"),
        ([1], "rows[0] has no mode and layers"),
        ([{"mode": "training", "layers": 1}], "training, 1 layers has no figures"),
        (
            [{"mode": "training", "layers": 1, "us": {"cgpass": None}}],
            "training, 1 layers, cgpass: is no number",
        ),
        (
            [{"mode": "training", "layers": 1, "us": {"cgpass": 1.0}, "differs": 3}],
            "training, 1 layers, differs: is no list of arms",
        ),
        (
            [{"mode": "training", "layers": 1, "us": {"cgpass": 1.0}, "differs": "cgpass"}],
            "training, 1 layers, differs: is no list of arms",
        ),
        ([], "it has no rows"),
    ],
)
def test_depths_without_figures_are_refused(tmp_path, capsys, rows, message):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"kind": "overhead", "meta": META, "rows": rows}))
    with pytest.raises(SystemExit, match="2"):
        bench_overhead.main(["--compare", str(path)])
    assert f"not all of a result: {message}" in capsys.readouterr().err


def test_what_is_to_be_shown_has_to_hold_all_that_is_shown(tmp_path, capsys):
    path = tmp_path / "new.json"
    path.write_text(json.dumps(of_an_arm(step_ms={"median": 1.0})))
    assert bench.parse(["--compare", str(path)]).compare
    with pytest.raises(SystemExit, match="2"):
        bench.parse(["--from", str(path)])
    assert "not all of a result: KeyError('p10')" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["bench", "memory", "overhead"])
def test_results_that_are_kept_are_whole(part):
    (path,) = results.RESULTS.glob(f"{part}-*.json")
    script = bench_overhead if part == "overhead" else bench
    assert compare.result(("time", "memory", "overhead"), shown=True)(str(path))["meta"]
    assert script.main(["--from", str(path), "--compare", str(path)]) == 0


def test_tiny_models_are_compared_with_tiny_ones(tmp_path, capsys):
    small = OLD | {"meta": META | {"tiny": True}}
    older = OLD | {"meta": META | {"command": "python scripts/bench.py --tiny --device cpu"}}
    paths = {"full": OLD, "tiny": small, "older": older}
    for name, data in paths.items():
        (tmp_path / name).write_text(json.dumps(data))
    full, tiny, older = (str(tmp_path / name) for name in paths)
    for fine in (
        ["--compare", full],
        ["--tiny", "--compare", tiny],
        ["--tiny", "--compare", older],
    ):
        assert bench.parse(fine).compare
    assert bench.parse(["--from", older, "--compare", tiny]).compare == small
    refused = {
        ("--compare", tiny): "--compare: results of tiny models, but of full ones now",
        ("--compare", older): "--compare: results of tiny models, but of full ones now",
        ("--tiny", "--compare", full): "--compare: results of full models, but of tiny ones now",
        ("--from", tiny, "--compare", full): "of full models, but of tiny ones now",
    }
    for command, message in refused.items():
        with pytest.raises(SystemExit, match="2"):
            bench.parse([*command])
        assert message in capsys.readouterr().err


def test_what_is_left_out_is_said(capsys):
    against(OLD | {"left_out": ["a"]}, OLD | {"left_out": ["b", "c"]})
    shown = capsys.readouterr().out.splitlines()
    assert "left out of the older result, out of time: a" in shown
    assert "left out of the newer result, out of time: b, c" in shown


@pytest.mark.parametrize("option", ["--compare", "--from"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no JSON in"),
        ([1], "results of kind unknown, not of time or memory"),
        ({"ratio_to_torch": {}}, "results of kind unknown, not of time or memory"),
        (overhead(cgpass=1.0), "results of kind overhead, not of time or memory"),
        ({"kind": "time", "meta": META}, "not all of a result: it has no results"),
        ({"kind": "time", "results": []}, "not all of a result: it doesn't say where it was"),
        (OLD | {"meta": {"gpu": "x"}}, "not all of a result: it doesn't say which torch"),
        (OLD | {"results": [3]}, "not all of a result: results[0] has no name"),
        (of_a_model(title=5), "not all of a result: a has no title"),
        (of_a_model(), "not all of a result: a has no arms"),
        (of_a_model(arms={"cgpass": 1}), "not all of a result: a, cgpass holds no figures"),
        (
            of_an_arm(step_ms="4"),
            "not all of a result: a, cgpass, step_ms: the median is no number",
        ),
        (of_an_arm(step_ms={}), "a, cgpass, step_ms: the median is no number"),
        (of_an_arm(step_ms={"median": "4.0"}), "a, cgpass, step_ms: the median is no number"),
        (of_an_arm(host_ms={"median": float("nan")}), "cgpass, host_ms: the median is no number"),
        (of_an_arm(check=[1]), "a, cgpass, check: holds nothing"),
        (of_an_arm(check={"default": {}}), "check, default: doesn't say whether it is equal"),
        (of_an_arm(check={"default": True}), "check, default: doesn't say whether it is equal"),
        (OLD | {"left_out": 3}, "not all of a result: left_out is no list of names"),
        (OLD | {"left_out": [3]}, "not all of a result: left_out is no list of names"),
        (OLD | {"left_out": "gpt2"}, "not all of a result: left_out is no list of names"),
        (
            of_an_arm(peak_reserved_bytes="1") | {"kind": "memory"},
            "a, cgpass, peak_reserved_bytes: is no number",
        ),
    ],
)
def test_files_that_are_no_older_result_are_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, option, data, message
):
    monkeypatch.setattr(bench, "run", None)
    path = tmp_path / "old.json"
    if data is not None:
        path.write_text(json.dumps(data))
    with pytest.raises(SystemExit, match="2"):
        bench.main([option, str(path)])
    assert f"argument {option}: " in (said := capsys.readouterr().err)
    assert message in said


def test_an_older_result_is_of_what_is_measured(tmp_path, capsys):
    for name, data in (("time", OLD), ("memory", memory(cgpass=1)), ("overhead", overhead())):
        (tmp_path / name).write_text(json.dumps(data))
    old, other = ("--compare", str(tmp_path / "time")), str(tmp_path / "memory")
    assert bench.parse([*old]).compare == OLD
    assert bench.parse(["--memory", *old, "--from", str(tmp_path / "time")]).source == OLD
    for more in (["--memory"], ["--from", other]):
        with pytest.raises(SystemExit, match="2"):
            bench.parse([*old, *more])
        assert "results of kind time, but of memory now" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench_overhead.main([*old])
    assert "results of kind time, not of overhead" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench.parse([*old, "--tolerance", "nan"])
    assert "argument --tolerance: 'nan' is no number from 0 on" in capsys.readouterr().err
