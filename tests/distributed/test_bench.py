"""The benchmark of several devices, tiny and on CPU; what it tells of arms that fail or never end."""

import importlib
import json
import os
import time

import pytest
import torch
from benchlib import crew


@pytest.fixture
def crew_of():
    """Starts processes; none outlives the test."""
    crews = []

    def start(**job):
        crews.append(crew.Crew(worker, 2, job, method="fork"))
        return crews[-1]

    yield start
    for each in crews:
        each.kill()


@pytest.fixture(scope="module")
def bench():
    """The script; it loads what takes seconds, and only for these tests."""
    for name in ("timm", "transformers"):
        pytest.importorskip(name)
    return importlib.import_module("bench_distributed")


FIRST = [{"first_s": 3.0}, {"first_s": 4.0}]


def turn(ms, replays, reserved):
    """Answers of two processes."""
    counters = {"calls": replays, "replays": replays}
    return [
        {"ms": ms, "counters": counters, "peak_reserved_bytes": reserved},
        {"ms": [100.0], "counters": counters, "peak_reserved_bytes": 2 * reserved},
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured there by scripts/gpu_check.sh")
def test_it_runs_on_cpu(bench, monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    tiny = ["--tiny", "--steps", "2", "--teardowns", "2", "--modes", "tensor parallel"]
    arms = ["--arms", "reduce-overhead,cgpass"]
    for limit in ("TURN_S", "ENDS_WITHIN_S"):
        monkeypatch.setattr(bench, limit, 600)  # however busy the machine is
    assert bench.main([*tiny, *arms, "--limit", "600", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["meta"]["devices"] == 2
    failed, ours = (
        found["modes"]["tensor parallel"]["arms"][arm] for arm in ("reduce-overhead", "cgpass")
    )
    assert failed == {"error": "RuntimeError: CUDA graphs of torch need a CUDA device"}
    assert ours["check"].pop("replays") > 0
    assert ours["check"] == {"equal": True, "steps": 4}
    assert ours["process_group_ended"]
    assert ours["counters"]["plain_calls"] == 0
    assert ours["counters"]["replays"] > 0
    assert ours["warmup_counters"]["partitions_captured"] == 2
    assert len(found["teardowns"]["ms"]) == found["teardowns"]["asked"] == 2
    assert (
        "| tensor parallel | reduce-overhead | - | - | - | failed: Runt" in capsys.readouterr().out
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs for it")
def test_without_gpus_only_a_tiny_one_is_measured(bench, capsys):
    assert bench.main([]) == 2
    assert "--tiny runs on CPU" in capsys.readouterr().err


@pytest.mark.parametrize("equal", [True, False])
def test_bits_that_differ_are_a_failure(bench, monkeypatch, capsys, equal):
    entry = {"step_ms": {"median": 2.0, "p10": 1.0, "p90": 3.0}, "process_group_ended": True}
    arms = {"default": entry, "cgpass": entry | {"check": {"equal": equal}}}
    found = {"modes": {"FSDP2": {"arms": arms}}, "teardowns": {}}
    monkeypatch.setattr(bench.Bench, "measured", lambda self: found)
    assert bench.main(["--tiny"]) == (0 if equal else 1)
    assert capsys.readouterr().err == ("" if equal else "FSDP2, cgpass: losses differ\n")


@pytest.mark.parametrize("option", ["--processes=0", "--steps=-1", "--teardowns=-1", "--limit=nan"])
def test_numbers_that_will_not_do_are_refused(bench, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        bench.main([option])
    assert f"argument {option.partition('=')[0]}: " in capsys.readouterr().err


def test_unknown_modes_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--modes", "pipeline"])
    assert "'pipeline' is none of tensor parallel, FSDP2, SimpleFSDP" in capsys.readouterr().err


def test_processes_are_told_of_as_one(bench):
    turns = [turn([50.0], 4, 3 << 20), turn([3.0, 5.0], 8, 1 << 20), turn([4.0], 12, 2 << 20)]
    found = bench.summary(FIRST, turns)
    assert found["first_step_s"] == 4.0
    assert found["step_ms"]["median"] == 4.0
    assert found["peak_reserved_bytes"] == 6 << 20
    assert found["steady_peak_reserved_bytes"] == 4 << 20
    assert (found["warmup_counters"]["replays"], found["counters"]["replays"]) == (4, 8)


@pytest.mark.parametrize(
    ("check", "note"),
    [
        ({"equal": True}, "losses and parameters bitwise equal"),
        ({"equal": False}, "losses and parameters bitwise **differ**"),
        (
            {"equal": False, "plain_repeatable": False},
            "losses and parameters bitwise **differ**; the plain runs differ too",
        ),
        (
            {"equal": False, "error": "no answer within 60 s"},
            "losses and parameters bitwise not compared: no answer within 60 s",
        ),
    ],
)
def test_what_the_table_says_of_bits(bench, check, note):
    counters = {"partitions_captured": 2, "partitions_eager": 1}
    entry = {
        "step_ms": {"median": 4.0, "p10": 3.0, "p90": 5.0},
        "peak_reserved_bytes": 2 << 20,
        "steady_peak_reserved_bytes": 1 << 20,
        "warmup_counters": counters,
        "check": check,
        "process_group_ended": False,
    }
    assert bench.table({"FSDP2": {"arms": {"cgpass": entry}}}).splitlines()[-1] == (
        f"| FSDP2 | cgpass | 4.00 (3.00 to 5.00) | 2 (1) | 2/1 | {note}; destroy_process_group never returned |"
    )


def worker(rank, job, pipe):
    """Doubles numbers; some of it as the job says."""
    while (number := pipe.recv()) != "end":
        if (rank, number) == (1, job.get("fails_at")):
            raise ValueError("three is too many")
        if (rank, number) == (1, job.get("exits_at")):
            os._exit(1)
        if job.get("waits_at") == number:
            time.sleep(600)
        pipe.send({"number": 2 * number + rank})


def test_a_crew_does_what_it_is_told(crew_of):
    crew = crew_of()
    for number in (1, 2):
        crew.say(number)
        assert crew.hear(120) == [{"number": 2 * number}, {"number": 2 * number + 1}]
    assert crew.error is None


@pytest.mark.parametrize(
    ("job", "limit", "error"),
    [
        ({"fails_at": 3}, 120, "ValueError: three is too many"),
        ({"exits_at": 3}, 120, "the process ended without a word"),
        ({"waits_at": 3}, 0.5, "no answer within 0 s"),
    ],
)
def test_a_crew_of_which_one_fails_is_ended(crew_of, monkeypatch, job, limit, error):
    monkeypatch.setattr("benchlib.crew.OTHERS_S", 120)
    crew = crew_of(**job)
    crew.say(3)
    assert crew.hear(limit) == []
    assert crew.error == error
    crew.say(4)  # nobody is there
    assert crew.hear(limit) == []
    assert not any(process.is_alive() for process in crew._processes)
