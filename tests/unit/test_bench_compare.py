"""Two results of a benchmark: what got worse by itself, and what only the machine changed."""

import argparse
import json

import pytest
from benchlib import compare

META = {"torch": "2.11.0", "gpu": "NVIDIA H200", "commit": "1234567"}


def timed(scale=1.0, name="time", **steps):
    """Results of one model, all times scaled as by another machine."""
    arms = {
        arm.replace("_", "-"): {
            "step_ms": {"median": ms * scale},
            "host_ms": {"median": ms * scale / 2},
        }
        for arm, ms in steps.items()
    }
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
    assert (found.worse, found.judged) == ([], 5)


def test_ratios_that_got_worse_are_named():
    new = timed(1.8, default=8.0, reduce_overhead=4.2, cgpass=4.3, limit=3.5)
    assert worse(OLD, new) == [
        "Small, B2, step ms, cgpass / default: 0.50 -> 0.54 (+7.5 %)",
        "Small, B2, step ms, cgpass / reduce-overhead: 0.95 -> 1.02 (+7.5 %)",
        "Small, B2, step ms, cgpass / limit: 1.14 -> 1.23 (+7.5 %)",
        "Small, B2, host ms, cgpass / default: 0.50 -> 0.54 (+7.5 %)",
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


def against(old, new):
    return compare.against(argparse.Namespace(compare=old, tolerance=5.0), new)


def test_what_is_printed(capsys):
    new = timed(default=8.0, reduce_overhead=4.2, cgpass=4.3)
    new["results"].append({"model": "other", "arms": {}})
    assert against(OLD, new)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Before: torch 2.11.0, NVIDIA H200, commit 1234567."
    assert "| Small, B2 | limit | 3.50 -> - | 1.75 -> - |" in shown
    assert "| Small, B2 | cgpass | 4.00 -> 4.30 (+7.5 %) | 2.00 -> 2.15 (+7.5 %) |" in shown
    line = "| Small, B2 | cgpass / default | {0} **worse** | {0} **worse** |"
    assert line.format("0.500 -> 0.537 (+7.5 %)") in shown
    assert "other: only in the newer result" in shown
    assert "Worse (tolerance 5 %), 4:" in shown


def test_nothing_to_judge_is_no_success(capsys):
    assert against(overhead(default=9.0, cgpass=3.0), overhead(default=9.0, cgpass=3.0))
    assert "Nothing to judge" in capsys.readouterr().out
    assert not against(OLD, OLD)


def test_results_of_different_kinds():
    with pytest.raises(ValueError, match="memory before, time now"):
        compare.compare(memory(cgpass=1), OLD, 5.0)


def test_an_older_result_is_read_before_anything_is_measured(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    assert parser.parse_args(["--compare", str(path)]).compare == OLD
    with pytest.raises(SystemExit):
        parser.parse_args(["--compare", str(tmp_path / "none.json")])
    assert "no JSON in" in capsys.readouterr().err
