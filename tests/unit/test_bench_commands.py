"""What benchmarks are asked for on the command line, and the status that they end with."""

import argparse

import bench
import bench_overhead
import pytest
from benchlib import arguments, arms, models

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
    found["arms"][arm] = {"step_ms": {"median": 3.0}} | entry
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


@pytest.mark.parametrize("arm", ["cgpass", "cgpass-lean", "cgpass-direct"])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"step_ms": {}}, "no figures"),
        ({"check": {}}, "losses not compared bitwise"),
        (
            {"stages": {"error": "RuntimeError:\nno | replay"}},
            "no stages: RuntimeError: no / replay",
        ),
        ({"kernels": {"error": "RuntimeError: no"}}, "no kernels: RuntimeError: no"),
    ],
)
def test_what_was_not_found_out_of_cgpass_is_a_failure(monkeypatch, capsys, arm, entry, message):
    found = model("small", STEPS)
    found["arms"][arm] = {
        key: value for key, value in (found["arms"]["cgpass"] | entry).items() if value
    }
    assert status(monkeypatch, [model("other", STEPS), found]) == 1
    said = capsys.readouterr()
    assert said.err == f"small, B2, {arm}: {message}\n"
    if failed := message.partition(": ")[2]:
        assert f"**{message.partition(': ')[0]}**: {failed}" in said.out


def test_so_is_no_result_at_all(monkeypatch, capsys):
    assert status(monkeypatch, []) == 1
    assert capsys.readouterr().err == "no results\n"
    assert status(monkeypatch, [model("small", {})]) == 1
    assert capsys.readouterr().err == "small, B2: no arms\n"


@pytest.mark.parametrize(
    "meta", [{"compile_only": True}, {"command": "python b.py --compile-only"}]
)
def test_nothing_is_measured_where_models_are_only_compiled(meta):
    found = model("small", STEPS)
    for entry in found["arms"].values():
        entry["losses"] = [entry.pop("step_ms")["median"]]
    assert list(bench.failures(result(found, **meta))) == []
    assert list(bench.failures(result(found))) == ["small, B2, cgpass: no figures"]


def test_losses_are_not_compared_where_memory_is_measured():
    found = model("small", {}) | {"arms": {"cgpass": {"peak_reserved_bytes": 5}}}
    assert list(bench.failures(result(found) | {"kind": "memory"})) == []
    found["arms"]["cgpass"] = {"losses": [1.0]}
    assert list(bench.failures(result(found) | {"kind": "memory"})) == [
        "small, B2, cgpass: no figures"
    ]


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
        (bench, "--parallel", "-3", "'-3' is no whole number from 1 on"),
        (bench, "--budget", "-5", "'-5' is no number above 0"),
        (bench, "--budget", "0", "'0' is no number above 0"),
        (bench, "--budget", "nan", "'nan' is no number above 0"),
        (bench, "--budget", "inf", "'inf' is no number above 0"),
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


def test_a_plot_that_there_is_none_of_is_refused_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(bench, "run", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--memory", "--plot", str(tmp_path / "p.svg")])
    message = "--plot: there is no plot of results of the kind 'memory'"
    assert message in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for script in (bench, bench_overhead):
        monkeypatch.setattr(script, "run", None)
        with pytest.raises(SystemExit, match="2"):
            script.main(["--plot", str(tmp_path / "p.svg")])
        assert "--plot: needs matplotlib, as of pip install" in capsys.readouterr().err


def test_models_that_are_left_out_for_want_of_time_are_a_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench.Fleet, "start", None)
    path = tmp_path / "b.json"
    assert bench.main(["--models=gpt2,bert", "--budget=10", f"--out={path}", "--device=cpu"]) == 1
    said = capsys.readouterr()
    assert said.err == "left out, out of time: gpt2, bert\n"
    assert "**Left out, out of time: gpt2, bert.**" in said.out.splitlines()
    assert bench.main(["--from", str(path)]) == 1


def test_a_number_of_processes_may_be_left_to_the_script():
    assert bench.parse(["--parallel=0"]).parallel == 0
    assert bench.parse(["--parallel=3", "--budget=0.5"]).budget == 0.5


def test_the_title_of_a_tiny_model_says_so():
    assert models.title("gpt2", tiny=False) == "GPT-2 small, B2 T128"
    assert models.title("gpt2", tiny=True) == "GPT-2 small, B2 T128 (tiny)"


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
