"""What benchmarks are asked for on the command line, and the status that they end with."""

import argparse

import bench
import bench_overhead
import pytest
from benchlib import arguments, arms

from tests.unit.bench_results import STEPS, model
from tests.unit.bench_results import bench as result


def status(monkeypatch, found):
    """How the benchmark ends when it measured this."""
    for each in found:
        for entry in each["arms"].values():
            if "step_ms" in entry:
                entry["step_ms"] |= {"p10": 1.0, "p90": 4.0}
    monkeypatch.setattr(bench, "run", lambda args, directory: result(*found))
    return bench.main([])


def test_an_arm_to_compare_with_may_fail(monkeypatch, capsys):
    found = model("mixtral", STEPS)
    found["arms"]["limit"] = {"error": "RuntimeError: called a synchronizing CUDA operation"}
    found["arms"]["eager"] = {"differs": True}
    assert status(monkeypatch, [found]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arm", ["cgpass", "cgpass-lean", "cgpass-direct", "cgpass-eager"])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"error": "RuntimeError: no"}, "failed"),
        ({"differs": True}, "losses differ"),
        ({"check": {"equal": False, "deterministic": True}}, "losses differ"),
    ],
)
def test_an_arm_of_cgpass_that_fails_or_differs_is_a_failure(
    monkeypatch, capsys, arm, entry, message
):
    found = model("small", STEPS)
    found["arms"][arm] = entry
    assert status(monkeypatch, [model("other", STEPS), found]) == 1
    assert capsys.readouterr().err == f"small, B2, {arm}: {message}\n"


def test_losses_that_are_not_those_of_default_are_a_failure(monkeypatch, capsys):
    found = model("small", STEPS)
    found["arms"]["default"]["losses"] = [1.0]
    found["arms"]["cgpass"] |= {
        "losses": [2.0],
        "check": {"equal": True, "deterministic": False},
        "warmup_counters": {"partitions_captured": 2, "partitions_eager": 0},
    }
    assert status(monkeypatch, [found]) == 1
    said = capsys.readouterr()
    assert said.err == "small, B2, cgpass: losses differ\n"
    assert "**losses differ from default's**" in said.out


def test_so_is_a_model_whose_process_ended(monkeypatch, capsys):
    assert status(monkeypatch, [model("small", {}, error="the process\nended")]) == 1
    assert capsys.readouterr().err == "small, B2: the process ended\n"


@pytest.mark.parametrize(
    ("script", "option", "value", "message"),
    [
        (bench, "--arms", "nonsense", f"unknown: nonsense; known: {', '.join(arms.KNOWN)}"),
        (bench, "--arms", ",", "names nothing"),
        (bench, "--arms", "", "names nothing"),
        (bench, "--models", ",", "names nothing"),
        (bench, "--models", "gpt2,gpt5", "unknown: gpt5; known: gpt2, "),
        (bench, "--rounds", "0", "'0' is no whole number from 1 on"),
        (bench, "--steps", "0", "'0' is no whole number from 1 on"),
        (bench, "--check-steps", "0", "'0' is no whole number from 1 on"),
        (bench_overhead, "--arms", "cgpass,nonsense", "unknown: nonsense; known: eager, default"),
        (bench_overhead, "--layers", "x", "'x' is no whole number from 1 on"),
        (bench_overhead, "--layers", "1,0", "'0' is no whole number from 1 on"),
        (bench_overhead, "--layers", "", "names nothing"),
    ],
)
def test_arguments_that_are_refused(monkeypatch, capsys, script, option, value, message):
    monkeypatch.setattr(script, "run", None)
    with pytest.raises(SystemExit, match="2"):
        script.main([f"{option}={value}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_names_and_numbers_with_commas():
    assert arguments.names(("a", "b"))("b, a,,b") == ["b", "a"]
    assert arguments.counts("10,1,10") == [10, 1]
    assert arguments.percent("0.5") == 0.5
    for text in ("nan", "inf", "-1", "five"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number from 0 on"):
            arguments.percent(text)


def test_the_help_names_the_usual_arms(capsys):
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help"])
    said = "".join(capsys.readouterr().out.split())
    assert f"usual:{','.join(arms.NAMES)}(" in said
    assert "alsocgpass-eager,cgpass-direct" in said
