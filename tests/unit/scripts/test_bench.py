"""The benchmark: its figures, comparisons and files, and a run of it on CPU."""

import json
import re
from argparse import ArgumentTypeError

import bench
import pytest
from benchlib import arms, report, worker

META = {
    "torch": "2.11.0+cu130",
    "gpu": "NVIDIA H200",
    "cores": 64,
    "driver": "1",
    "commit": "abc",
    "command": "c",
}


def ms(median, spread=0.0):
    return {"median": median, "p10": median * (1 - spread), "p90": median * (1 + spread)}


def arm(step, *, spread=0.0, **more):
    return {"step_ms": ms(step, spread), "host_ms": ms(step / 2, spread)} | more


EQUAL = {"check": {"equal": True, "deterministic": False}}


def result(found, mode="train", **more):
    model = {"model": "gpt2", "mode": mode, "title": "GPT-2", "arms": found}
    return {"meta": META, "results": [model]} | more


def usual(cgpass=4.0, limit=3.5, **more):
    return {"default": arm(15.0), "cgpass": arm(cgpass, **EQUAL, **more), "limit": arm(limit)}


def test_spread_of_known_numbers():
    assert worker.spread_of([float(n) for n in range(1, 12)]) == {"median": 6, "p10": 2, "p90": 10}
    assert worker.spread_of([5.0]) == {"median": 5, "p10": 5, "p90": 5}
    assert worker.spread_of([1.0, 1.0, 1.0, 100.0])["median"] == 1.0


def against(then, now, tolerance=5.0):
    found = {"cgpass": now | EQUAL, "cgpass@baseline": then}
    return report.slower_than_baseline(result(found), tolerance)


def test_what_is_within_the_tolerance_or_the_noise_is_not_slower():
    slow, host = against(arm(4.0), arm(4.4))
    assert slow == "GPT-2, train, cgpass: step_ms 1.100 of the baseline's"
    assert "host_ms 1.100" in host
    assert against(arm(4.0), arm(4.19)) == []
    assert len(against(arm(4.0), arm(4.19), tolerance=1.0)) == 2
    assert against(arm(4.0), arm(3.0)) == []
    assert against(arm(4.0, spread=0.2), arm(4.5, spread=0.2)) == []
    assert len(against(arm(4.0, spread=2.0), arm(5.2, spread=2.0))) == 2  # no more than a fifth


def test_slower_than_the_baseline_of_the_same_run():
    found = usual(4.0, peak_reserved_bytes=100) | {
        "cgpass@baseline": arm(3.9, peak_reserved_bytes=90)
    }
    assert report.slower_than_baseline(result(found), 5.0) == [
        "GPT-2, train, cgpass: peak_reserved_bytes 1.111 of the baseline's"
    ]
    found["cgpass@baseline"] = arm(3.0)
    assert len(report.slower_than_baseline(result(found), 5.0)) == 2
    assert "| GPT-2 | cgpass | 1.333 | 1.333 |" in report.render(result(found))
    assert report.problems(result(found | {"cgpass@baseline": {"error": "no"}})) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"error": "RuntimeError:\nno | replay"}, "failed: RuntimeError: no / replay"),
        (arm(4.0, check={"equal": False}), "results differ"),
        (
            arm(4.0, check={"equal": False, "error": "no answer in time"}),
            "failed: no answer in time",
        ),
        ({"losses": [1.0]}, "no figures"),
    ],
)
def test_what_makes_a_result_none(entry, message):
    (said,) = report.problems(result(usual() | {"cgpass:rng=paired": entry}))
    assert said == f"GPT-2, train, cgpass:rng=paired: {message}"


def test_arms_and_their_options():
    assert arms.parse("cgpass:rng=paired:max_recordings=3@baseline") == (
        "cgpass",
        {"rng": "paired", "max_recordings": 3},
    )
    for name, message in (
        ("limit:rng=paired", "takes no options"),
        ("cgpass:paired", "is no option=value"),
    ):
        with pytest.raises(ArgumentTypeError, match=re.escape(message)):
            arms.parse(name)
    ours = {"cgpass", "cgpass:rng=paired", "cgpass-step", "graphed"}
    theirs = {"default", "limit", "cgpass@baseline", "cgpass:rng=paired@baseline"}
    assert {name for name in ours | theirs if arms.is_ours(name)} == ours


def run(tmp_path, *given):
    path = tmp_path / "found.json"
    command = ["--device=cpu", "--quick", f"--out={path}", *given]
    return bench.main(["--budget=900", *command]), json.loads(path.read_text())


def test_all_arms_that_run_on_cpu(tmp_path, capsys):
    ours = ("cgpass", "cgpass-step", "graphed")
    chosen = ["eager", *ours, "limit"]
    status, data = run(tmp_path, "--models=stack1", "--arms", *chosen)
    found = data["results"][0]["arms"]
    assert (status, list(found)) == (0, chosen), capsys.readouterr().err
    assert found["limit"]["error"] == "RuntimeError: limit needs a CUDA device"
    for name in chosen[:-1]:
        assert 0 < found[name]["host_ms"]["median"] <= found[name]["step_ms"]["median"]
        assert found[name]["losses"] == found["eager"]["losses"], name
    assert all(found[name]["check"] == {"equal": True, "deterministic": False} for name in ours)
    assert found["cgpass"]["settled"] == {"steps": 2, "recordings": 2, "plain_calls": 0}
    assert found["cgpass"]["per_step"]["replays"] == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--arms", "nonsense"], "unknown arm 'nonsense'; known: eager, default"),
        (["--models", "gpt2", "gpt5"], "invalid choice: 'gpt5' (choose from"),
        (["--baseline", "/nowhere"], "there is no cgpass in /nowhere"),
    ],
)
def test_arguments_that_are_refused(capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        bench.main(given)
    assert message in capsys.readouterr().err
