"""Where the host's time of a call goes: what is before a graph's launch, the launch, and what comes after it."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchlib.measure import synchronize
from benchlib.report import STAGES
from cgpass.runtime import owner
from cgpass.runtime.executor import Executor
from cgpass.runtime.recording import Recording


@contextlib.contextmanager
def marked() -> Iterator[list[float]]:
    """When a graph's executor was entered, when its replay had been launched, and when the executor returned."""
    marks: list[float] = []
    call = Executor.__call__

    def timed(self: Executor, args: list[Any]) -> list[Any]:
        marks.append(time.perf_counter())
        results = call(self, args)
        marks.append(time.perf_counter())
        return results

    def launched(recording: Recording) -> Callable[[], None]:
        replay = recording.replay

        def launch() -> None:
            replay()
            marks.append(time.perf_counter())

        return launch

    recordings = [r for o in list(owner._owners) for slot in o._slots for r in slot.recordings]
    replays = [recording.replay for recording in recordings]
    for recording in recordings:
        recording.replay = launched(recording)
    Executor.__call__ = timed  # type: ignore[method-assign]
    try:
        yield marks
    finally:
        Executor.__call__ = call  # type: ignore[method-assign]
        for recording, replay in zip(recordings, replays, strict=True):
            recording.replay = replay


def stages(step: Callable[[], None], mode: str, device: torch.device) -> dict[str, Any]:
    """Where a call's time goes, in microseconds.

    Guards are measured by the profiler, in calls of their own; "until_done" is until the device is, too.

    Args:
        step: A call of one whole graph each way.
        mode: "inference", or one of training.
        device: Where it runs.

    Raises:
        RuntimeError: Calls are no replays.
    """
    graphs = ("forward",) if mode == "inference" else ("forward", "backward")
    rows = []
    with marked() as marks:
        for _ in range(100):
            synchronize(device)
            marks.clear()
            begin = start = time.perf_counter()
            step()
            end = time.perf_counter()
            synchronize(device)
            done = time.perf_counter()
            if len(marks) != 3 * len(graphs):
                continue  # something was recorded anew
            ends = [*marks[3::3], end]
            row = [done - begin]
            for n in range(len(graphs)):
                entered, launched, left = marks[3 * n : 3 * n + 3]
                row += [entered - start, launched - entered, left - launched, ends[n] - left]
                start = ends[n]
            if len(graphs) == 2:  # what lies between the graphs is before the second
                row[5] += row[4]
                row[4] = 0.0
            rows.append(row)
    if len(rows) < 50:
        raise RuntimeError(f"only {len(rows)} of 100 steps were a replay each way")
    until_done, *medians = [
        round(statistics.median(column) * 1e6, 1) for column in zip(*rows, strict=True)
    ]
    found: dict[str, Any] = {
        graph: dict(zip(STAGES, medians[4 * n : 4 * n + 4], strict=True))
        for n, graph in enumerate(graphs)
    }
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        for _ in range(20):
            step()
    synchronize(device)
    guards = [e for e in profiled.key_averages() if e.key == "TorchDynamo Cache Lookup"]
    found["until_done"] = until_done
    found["guards"] = round(sum(e.self_cpu_time_total for e in guards) / 20, 1)
    return found
