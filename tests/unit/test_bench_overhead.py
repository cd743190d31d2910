"""Host time of stacks: rows with stages, and for how long a call keeps the device busy."""

import json
from types import SimpleNamespace

import bench_overhead
import pytest
import torch

from tests.unit.bench_results import overhead

CPU = torch.device("cpu")


def test_stages_of_stacks(monkeypatch):
    monkeypatch.setattr(bench_overhead.meta, "describe", lambda device: {})
    *_, data = bench_overhead.run([1], ["cgpass"], CPU)
    assert [(row["mode"], row["layers"]) for row in data["rows"]] == [
        ("inference", 1),
        ("training", 1),
    ]
    for row in data["rows"]:
        found = row["stages"]["cgpass"]
        assert found["forward"]["replay"] < found["forward"]["wrappers"], "replays do nothing"
        assert ("backward" in found) == (row["mode"] == "training")


@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_what_profiles_tell_is_noted_after_all_timing(monkeypatch, on):
    profiled = []

    def kernels_of(step, device):
        profiled.append(step)
        return {"gpu_busy_ms": 0.25}

    def recorded(layers, mode, device, names):
        return {name: SimpleNamespace(**{mode: (layers, mode, name)}) for name in names}

    def guards(step, device, until_done):
        assert until_done == 9.0
        return (step, torch.autograd.is_multithreading_enabled())

    monkeypatch.setattr(bench_overhead, "recorded", recorded)
    monkeypatch.setattr(bench_overhead, "kernels_of", kernels_of)
    monkeypatch.setattr(bench_overhead, "guards", guards)
    ours, modes = ("cgpass", "cgpass-direct"), ("inference", "training", "training, one thread")
    rows = [
        {"mode": mode, "layers": 10, "stages": {name: {"until_done": 9.0} for name in ours}}
        for mode in modes
    ]
    bench_overhead.note_profiled(rows, ["default", *ours], torch.device(on))
    for row in rows:
        mode, _, thread = row["mode"].partition(", ")
        for name in ours:
            noted = row["stages"][name]
            assert noted["guards"] == ((10, mode, name), not thread)
            assert noted.get("gpu_busy") == (250.0 if on == "cuda" else None)
    assert len(profiled) == (12 if on == "cuda" else 0)


def test_folders_are_made_for_what_is_written(tmp_path, capsys):
    (tmp_path / "old.json").write_text(json.dumps(overhead()))
    numbers, tables = tmp_path / "a" / "x.json", tmp_path / "b" / "c" / "x.md"
    command = ["--from", str(tmp_path / "old.json"), "--json", str(numbers)]
    assert bench_overhead.main([*command, "--markdown", str(tables)]) == 0
    assert json.loads(numbers.read_text()) == overhead()
    assert tables.read_text() in capsys.readouterr().out
