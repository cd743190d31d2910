"""Host time of stacks: rows with stages, and for how long a call keeps the device busy."""

from types import SimpleNamespace

import bench_overhead
import pytest
import torch

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


@pytest.mark.parametrize("busy_ms", [0.25, 0.0])
def test_for_how_long_the_device_is_busy(monkeypatch, busy_ms):
    profiled = []

    def kernels_of(step, device):
        profiled.append(step)
        return {"gpu_busy_ms": busy_ms}

    def recorded(layers, mode, device, names):
        return {name: SimpleNamespace(**{mode: (layers, mode)}) for name in names}

    monkeypatch.setattr(bench_overhead, "recorded", recorded)
    monkeypatch.setattr(bench_overhead, "kernels_of", kernels_of)
    modes = ("inference", "training", "training, one thread")
    rows = [{"mode": m, "layers": n, "stages": {"cgpass": {}}} for n in (1, 10) for m in modes]
    bench_overhead.note_busy(rows, 10, CPU)
    assert set(profiled) == {(10, "inference"), (10, "training")}
    noted = [] if not busy_ms else ["gpu_busy"]
    assert [list(row["stages"]["cgpass"]) for row in rows] == [[]] * 3 + [noted] * 3
    assert all(row["stages"]["cgpass"].get("gpu_busy", 250.0) == 250.0 for row in rows)
