"""Measurements on arms: times, memory, counters, kernels, equal losses."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

import cgpass
from benchlib.arms import REFERENCE, Arm, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchlib.models import Batch, Workload

CHECK_SEED = 1234
LOSS_TOLERANCE = 0.02


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def losses(arm: Arm, steps: int) -> list[float]:
    """Losses of the first steps from a fixed RNG state, over rotating batches."""
    torch.manual_seed(CHECK_SEED)
    batches = arm.workload.batches
    return [float(arm.step(batches[step % len(batches)])) for step in range(steps)]


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Fills the yielded dict with the differences of cgpass's counters at exit."""
    before = dict(cgpass.counters())
    difference: dict[str, int] = {}
    yield difference
    after = cgpass.counters()
    difference.update({key: value - before.get(key, 0) for key, value in after.items()})


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch's deterministic algorithms; ops that have none only warn, the control catches them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def losses_twice(
    workload: Workload, steps: int, name: str = REFERENCE
) -> tuple[list[float], list[float]]:
    """Losses of two runs of an arm: what others are held against, and its control."""
    arm = make(name, workload)
    arm.prepare()
    first = losses(arm, steps)
    arm.restart()
    return first, losses(arm, steps)


def check_close(measured: list[float], eager: list[float]) -> bool:
    """Whether losses agree with eager's within what bf16 and other dropout masks explain."""
    return all(
        abs(ours - theirs) <= LOSS_TOLERANCE * max(1.0, abs(theirs))
        for ours, theirs in zip(measured, eager, strict=True)
    )


def release(device: torch.device) -> None:
    """Returns what dropped arms held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_block(arm: Arm, *, steps: int, discard: int, loop: bool = True) -> dict[str, list[float]]:
    """One block of an arm: synchronised steps with their host time, then, with `loop`, a loop without syncs.

    Returns:
        Lists of `step_ms` and `host_ms` (forward and backward until enqueued), one per step, and
        `loop_ms` per step of the loop, one per block.
    """
    device, batches = arm.workload.device, arm.workload.batches
    for index in range(discard):
        arm.step(batches[index % len(batches)])
    synchronize(device)
    step_ms, host_ms = [], []
    for index in range(steps):
        total, host = _timed_step(arm, batches[index % len(batches)])
        step_ms.append(total)
        host_ms.append(host)
    if not loop:
        return {"step_ms": step_ms, "host_ms": host_ms}
    start = time.perf_counter()
    for index in range(2 * steps):
        arm.step(batches[index % len(batches)])
    synchronize(device)
    loop_ms = (time.perf_counter() - start) * 1e3 / (2 * steps)
    return {"step_ms": step_ms, "host_ms": host_ms, "loop_ms": [loop_ms]}


def _timed_step(arm: Arm, batch: Batch) -> tuple[float, float]:
    start = time.perf_counter()
    arm.begin()
    before = time.perf_counter()
    arm.forward_backward(batch)
    after = time.perf_counter()
    arm.finish()
    synchronize(arm.workload.device)
    end = time.perf_counter()
    return (end - start) * 1e3, (after - before) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": round(statistics.median(ordered), 4),
        "p10": round(ordered[round(0.1 * last)], 4),
        "p90": round(ordered[round(0.9 * last)], 4),
    }


def peak_memory(arm: Arm, *, steps: int) -> dict[str, int]:
    """Peaks of warmed-up steps, in bytes."""
    device, batches = arm.workload.device, arm.workload.batches
    if device.type != "cuda":
        return {}
    synchronize(device)
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    for index in range(steps):
        arm.step(batches[index % len(batches)])
    synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "device_used_bytes": total - free,
    }


def kernels(arm: Arm) -> dict[str, Any]:
    """Kernels of one forward and backward; see `kernels_of`."""
    batch, device = arm.workload.batches[0], arm.workload.device
    if device.type != "cuda":
        return {}
    arm.begin()
    found = kernels_of(lambda: arm.forward_backward(batch), device)
    arm.finish()
    return found


def kernels_of(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Kernels of a call: launched by graph replays, and all of them; nothing where there is no CUDA.

    A kernel belongs to a replay if the runtime call with its correlation id is a graph launch.
    """
    if device.type != "cuda":
        return {}
    synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        synchronize(device)
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events = json.load(file, strict=False)["traceEvents"]
    finally:
        os.unlink(path)
    return count_kernels(events)


def count_kernels(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts kernels in the events of a Chrome trace."""
    launches = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "GraphLaunch" in event.get("name", "")
    }
    found = [event for event in events if event.get("cat") == "kernel"]
    captured = [event for event in found if event["args"].get("correlation") in launches]
    copies = [event for event in events if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    return {
        "captured": len(captured),
        "total": len(found),
        "graph_launches": len(launches),
        "copies_and_sets": len(copies),
        "gpu_busy_ms": round(sum(event.get("dur", 0) for event in found + copies) / 1e3, 4),
    }
