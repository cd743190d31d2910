"""Worker processes that fail or end early: what is written of their arms."""

import json
from types import SimpleNamespace

import bench
import pytest
from benchlib import compare, report, worker

from tests.unit.bench_results import META

DONE = {"title": "Small, B2", "done": True}


def job(*arms, kind="memory"):
    return worker.Job(
        name="small" if kind == "time" else f"small.{arms[0]}",
        kind=kind,
        model="small",
        arms=arms,
        device="cpu",
        tiny=True,
        steps=1,
        rounds=1,
        check_steps=1,
        directory="",
    )


@pytest.fixture
def fleet(tmp_path):
    return bench.Fleet(SimpleNamespace(device="cpu"), tmp_path, 0.0)


def ended(fleet, job, status, **wrote):
    """A process of this job that ended, and what it had written by then."""
    fleet.processes[job.name] = SimpleNamespace(poll=lambda: status, returncode=status)
    if wrote:
        fleet.file(job, "json").write_text(json.dumps({"model": job.model} | wrote))


def test_an_arm_that_fails_while_its_memory_is_measured_is_marked(fleet):
    jobs = [job(arm) for arm in ("default", "cgpass", "reduce-overhead")]
    ended(fleet, jobs[0], 1, arms={"default": {}}, error="no memory", traceback="")
    ended(fleet, jobs[1], 1, arms={"cgpass": {"losses": [1.0]}}, error="OutOfMemoryError: x")
    ended(fleet, jobs[2], 0, arms={"reduce-overhead": {"peak_reserved_bytes": 5}}, **DONE)
    (model,) = bench.merge([fleet.collect(each) for each in jobs])
    assert {name: entry.get("error") for name, entry in model["arms"].items()} == {
        "default": "no memory",
        "cgpass": "OutOfMemoryError: x",
        "reduce-overhead": None,
    }
    data = {"kind": "memory", "meta": META | {"parallel": 1}, "results": [model]}
    assert list(bench.failures(data)) == ["Small, B2, cgpass: failed"]
    assert compare.title(model) == "Small, B2"
    assert "| Small, B2 | cgpass | - | - | - | - | failed: OutOfMemoryError: x |" in report.render(
        data
    )


def test_an_arm_whose_process_is_killed_while_its_memory_is_measured_is_marked(fleet):
    ended(fleet, job("cgpass"), -9, arms={})
    (model,) = bench.merge([fleet.collect(job("cgpass"))])
    assert model["arms"]["cgpass"]["error"] == "the process ended with status -9"


@pytest.mark.parametrize("wrote", [{}, {"arms": {"default": {"losses": [1.0]}, "limit": {}}}])
def test_arms_that_a_process_is_started_again_without_are_not_forgotten(fleet, monkeypatch, wrote):
    whole = job("default", "cudagraphs", "cgpass", "limit", kind="time")
    ended(fleet, whole, -11, **wrote)
    monkeypatch.setattr(fleet, "start", lambda job: None)
    batch = [whole]
    assert fleet.restart_failed(batch) == batch
    assert batch[0].arms == ("default", "cgpass")
    ended(fleet, batch[0], 0, arms={"default": {}, "cgpass": {}}, **DONE)
    found = fleet.collect(batch[0])
    died = {"error": "the process ended with status -11 while preparing"}
    assert found["arms"] == {"default": {}, "cgpass": {}, "cudagraphs": died, "limit": died}
    assert "error" not in found
    rows = report.time_rows(found)
    assert (
        sum("failed: the process ended with status -11 while preparing" in row for row in rows) == 2
    )


def test_what_an_arm_said_before_its_process_ended_is_kept(fleet, monkeypatch):
    whole = job("cudagraphs", "cgpass", "limit", kind="time")
    said = {"error": "RuntimeError: no graph"}
    ended(fleet, whole, -6, arms={"cudagraphs": said, "cgpass": {}})
    monkeypatch.setattr(fleet, "start", lambda job: None)
    fleet.restart_failed(batch := [whole])
    found = fleet.collect(batch[0])
    assert found["arms"]["cudagraphs"] == said
    assert found["arms"]["limit"]["error"].endswith("status -6 while preparing")
