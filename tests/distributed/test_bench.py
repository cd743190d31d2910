"""The benchmark of several devices, tiny and on CPU; what it tells of arms that fail or never end."""

import importlib
import json
import time
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def bench():
    """The script; it loads what takes seconds, and only for these tests."""
    for name in ("timm", "transformers"):
        pytest.importorskip(name)
    return importlib.import_module("bench_distributed")


CGPASS = {
    "step_ms": {"median": 4.0, "p10": 3.0, "p90": 5.0},
    "peak_reserved_bytes": 2 << 20,
    "warmup_counters": {"partitions_captured": 2, "partitions_eager": 1},
    "check": {"equal": True, "steps": 4},
    "ended": True,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured there by scripts/gpu_check.sh")
def test_it_runs_on_cpu(bench, tmp_path, capsys):
    path = tmp_path / "found.json"
    tiny = ["--tiny", "--steps", "2", "--teardowns", "2", "--modes", "tensor parallel"]
    arms = ["--arms", "reduce-overhead,cgpass"]
    assert bench.main([*tiny, *arms, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["meta"]["devices"] == 2
    assert "left_out" not in found
    failed, ours = (
        found["modes"]["tensor parallel"]["arms"][arm] for arm in ("reduce-overhead", "cgpass")
    )
    assert failed == {"error": "RuntimeError: CUDA graphs of torch need a CUDA device"}
    assert ours["check"] == {"equal": True, "steps": 4}
    assert ours["process_group_ended"]
    assert ours["counters"]["plain_calls"] == 0
    assert ours["counters"]["replays"] > 0
    assert ours["warmup_counters"]["partitions_captured"] == 2
    assert len(found["teardowns"]["ms"]) == found["teardowns"]["asked"] == 2
    assert found["teardowns"]["process_group_ended"]
    assert (
        "| tensor parallel | reduce-overhead | - | - | - | failed: Runt" in capsys.readouterr().out
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs for it")
def test_without_gpus_only_a_tiny_one_is_measured(bench, capsys):
    assert bench.main([]) == 2
    assert "--tiny runs on CPU" in capsys.readouterr().err


def test_unknown_modes_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--modes", "pipeline"])
    assert "'pipeline' is none of tensor parallel, FSDP2, SimpleFSDP" in capsys.readouterr().err


def test_what_budgets_leave_no_time_for_is_listed(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "run", lambda job, limit: [{"ms": [1.0], "ended": True}])
    path = tmp_path / "found.json"
    arguments = ["--tiny", "--budget", "0", "--modes", "FSDP2", "--json", str(path)]
    assert bench.main(arguments) == 0
    found = json.loads(path.read_text())
    assert found["left_out"] == ["FSDP2.default", "FSDP2.reduce-overhead", "FSDP2.cgpass"]
    assert found["modes"] == {}


def test_processes_are_told_of_as_one(bench):
    other = CGPASS | {"peak_reserved_bytes": 3 << 20, "check": {"equal": False, "steps": 4}}
    found = bench.merged([CGPASS, other])
    assert found["peak_reserved_bytes"] == 3 << 20
    assert found["check"] == {"equal": False, "steps": 4}
    assert found["process_group_ended"]
    hung = {key: value for key, value in CGPASS.items() if key != "ended"}
    assert not bench.merged([CGPASS, hung])["process_group_ended"]
    silent = {"error": "no results within 100 s"}
    assert bench.merged([silent, {"error": "wrong"}]) == {"error": "wrong"}
    table = bench.table({"FSDP2": {"arms": {"cgpass": bench.merged([CGPASS, hung])}}})
    assert table.splitlines()[-1] == (
        "| FSDP2 | cgpass | 4.00 (3.00 to 5.00) | 2 | 2/1 | losses and parameters bitwise equal; destroy_process_group "
        "never returned |"
    )


def never_ends(rank, job):
    if rank or job["mode"] == "writes":
        (Path(job["directory"]) / f"{rank}.json").write_text(json.dumps({"ms": [1.0]}))
    time.sleep(60)


@pytest.mark.parametrize("mode", ["writes", "is silent"])
def test_a_process_that_never_ends_is_ended(bench, monkeypatch, mode):
    monkeypatch.setattr(bench, "work", never_ends)
    monkeypatch.setattr(bench, "ENDS_WITHIN_S", 0.2)
    job = {"processes": 2, "device": "cpu", "mode": mode}
    ranks = bench.run(job, 0.7)
    found = bench.merged(ranks)
    if mode == "writes":
        assert found == {"ms": [1.0], "process_group_ended": False}
    else:
        assert found == {"error": "no results within 1 s"}
