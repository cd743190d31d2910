"""Where the host's time of a call goes: guards, wrappers, what is around each replay, and autograd."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from benchlib import marks
from benchlib.measure import counted, synchronize
from benchlib.report import FORWARD, GRAPHS, PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CALLS = 100


def part_between(before: str, after: str, *, backward: bool) -> str:
    """Which part of a call lies between two marks that follow each other."""
    inside = {
        marks.ENTER: "signature and copies",
        marks.STEP: "eager operators" if after == marks.STEPPED else "signature and copies",
        marks.REPLAY: "replay",
        marks.LAUNCHED: "outputs",
        marks.STEPPED: "outputs",
        marks.CALL: "wrappers",
    }
    if before in inside:
        return inside[before]
    if before == marks.LEAVE and after in (marks.RETURN, marks.STEPPED):
        return "wrappers" if after == marks.RETURN else "outputs"
    if backward:
        return "autograd's walk" if before == marks.BACKWARD else "gradients"
    return "until called" if after in (marks.CALL, marks.ENTER) else "after the last graph"


def sums(begin: float, taken: list[marks.Mark]) -> dict[tuple[str, str], float]:
    """Seconds of each part of a step, forward and backward by themselves.

    Args:
        begin: When the step began.
        taken: Its marks; the last one is its end.
    """
    found = {(graph, part): 0.0 for graph in GRAPHS for part in PARTS}
    graph, before, since = FORWARD, "", begin
    for after, at in taken:
        found[graph, part_between(before, after, backward=graph != FORWARD)] += at - since
        if after == marks.BACKWARD:
            graph = GRAPHS[1]
        before, since = after, at
    return found


def _is_of_replays(taken: list[marks.Mark], counters: dict[str, int]) -> bool:
    """Whether a step replayed what it can, and each replay was marked."""
    launched = sum(where == marks.LAUNCHED for where, _ in taken)
    others = counters["warmups"] + counters["recordings"]
    return not others and launched == counters["replays"] > 0


def stages(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Where a step's time goes, in microseconds: medians of what each part takes, summed over the graphs of a step.

    "until_done" is until the device is done, too. Call it before anything is profiled, after which launches may
    take longer.

    Args:
        step: A call under `torch.no_grad()`, or a forward and a backward.
        device: Where it runs.

    Raises:
        RuntimeError: Steps are no replays.
    """
    rows, replays, until_done = [], 0, []
    with marks.taken() as taken:
        for _ in range(5):
            step()  # what is met for the first time is marked from then on
        for _ in range(CALLS):
            synchronize(device)
            taken.clear()
            with counted() as counters:
                begin = time.perf_counter()
                step()
                taken.append((marks.END, time.perf_counter()))
                synchronize(device)
                done = time.perf_counter()
            if _is_of_replays(taken, counters):
                rows.append(sums(begin, taken))
                replays = counters["replays"]
                until_done.append(done - begin)
    if len(rows) < CALLS // 2:
        raise RuntimeError(f"only {len(rows)} of {CALLS} steps replayed all that is captured")
    found: dict[str, Any] = {"until_done": _microseconds(until_done), "replays": replays}
    for graph in GRAPHS:
        medians = {part: _microseconds([row[graph, part] for row in rows]) for part in PARTS}
        if any(medians.values()):
            found[graph] = {part: median for part, median in medians.items() if median}
    return found


def _microseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def guards(step: Callable[[], None], device: torch.device, *, until_done: float) -> float:
    """Microseconds that Dynamo looks for a graph whose guards hold, per step, as profiled: after all that is timed.

    Args:
        step: As for `stages`.
        device: Where it runs.
        until_done: Microseconds that a step takes; of a long one a few are looked at, since a profile of it is long.
    """
    steps = 20 if until_done < 10_000 else 3
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        for _ in range(steps):
            step()
    synchronize(device)
    found = [e for e in profiled.key_averages() if e.key == "TorchDynamo Cache Lookup"]
    return round(sum(e.self_cpu_time_total for e in found) / steps, 1)
