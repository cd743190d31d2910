"""Kernels in a profiler's trace: which partition launched them, and whether a CUDA graph did.

A kernel carries the number of the runtime call that launched it. That call lies inside of the range that its partition
was run in, on the same thread, and is a graph launch or none. Where it is one, what else the range launches prepares
the replay (copies of inputs, offsets of random numbers): no kernels of the partition's, but time of the GPU's.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_PREFIX: Final = "cgpass:"
_RUNTIME: Final = ("cuda_runtime", "cuda_driver")
_WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Launches:
    """What one call launched."""

    kernels: dict[tuple[int, str], int] = field(default_factory=dict)
    """By number of a graph and name of its partition."""
    in_graphs: dict[tuple[int, str], int] = field(default_factory=dict)
    """Those that a CUDA graph launched."""
    gpu_us: float = 0.0
    """Time of all kernels, copies and fills, of all that the call launched."""
    gpu_us_in_graphs: float = 0.0

    @property
    def gpu_share(self) -> float | None:
        """Share of the GPU's time inside CUDA graphs; None if nothing ran on it."""
        return self.gpu_us_in_graphs / self.gpu_us if self.gpu_us else None


def range_name(graph: int, partition: str) -> str:
    """What a trace calls the time in which a partition runs."""
    return f"{_PREFIX}{graph}:{partition}"


def events_of(profile: Any) -> list[dict[str, Any]]:
    """The events of a `torch.profiler.profile` that is over."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file, strict=False)["traceEvents"]
    finally:
        os.unlink(path)


@dataclass(frozen=True)
class _Range:
    key: tuple[int, str]
    thread: Any
    start: float
    end: float

    def holds(self, event: Mapping[str, Any]) -> bool:
        return self.thread == event.get("tid") and self.start <= event.get("ts", -1) <= self.end


def launches(events: Iterable[Mapping[str, Any]]) -> Launches:
    """Count a trace's kernels.

    Args:
        events: Of a Chrome trace, as torch.profiler writes it.
    """
    events = list(events)
    ranges = _ranges(events)
    homes: dict[Any, _Range | None] = {}
    graphs: set[Any] = set()
    for event in events:
        if event.get("cat") in _RUNTIME:
            number = event.get("args", {}).get("correlation")
            homes[number] = _innermost(ranges, event)
            if "GraphLaunch" in event.get("name", ""):
                graphs.add(number)
    replayed = [homes[number] for number in graphs]
    found = Launches()
    kernels: dict[tuple[int, str], int] = defaultdict(int)
    in_graphs: dict[tuple[int, str], int] = defaultdict(int)
    for event in events:
        if event.get("cat") not in _WORK:
            continue
        number = event.get("args", {}).get("correlation")
        found.gpu_us += event.get("dur", 0)
        found.gpu_us_in_graphs += event.get("dur", 0) * (number in graphs)
        home = homes.get(number)
        if home is None or event["cat"] != "kernel":
            continue
        if number in graphs or home not in replayed:
            kernels[home.key] += 1
            in_graphs[home.key] += number in graphs
    found.kernels, found.in_graphs = dict(kernels), dict(in_graphs)
    return found


def _ranges(events: Iterable[Mapping[str, Any]]) -> list[_Range]:
    found = []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "user_annotation" and name.startswith(_PREFIX):
            number, _, partition = name.removeprefix(_PREFIX).partition(":")
            start = event["ts"]
            end = start + event.get("dur", 0)
            found.append(_Range((int(number), partition), event.get("tid"), start, end))
    return found


def _innermost(ranges: Sequence[_Range], event: Mapping[str, Any]) -> _Range | None:
    around = [each for each in ranges if each.holds(event)]
    return min(around, key=lambda each: each.end - each.start, default=None)
