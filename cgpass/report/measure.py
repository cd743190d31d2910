"""What calls do while they are watched: times of partitions, and the kernels that they launch."""

import contextlib
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from cgpass import telemetry
from cgpass.report import kernels
from cgpass.runtime.owner import Owner

Key = tuple[int, str]
"""Number of a graph, and the name of one of its partitions; of a graph that runs plainly, an empty name."""

RUNS: Final = 5
"""Calls whose median counts."""


@dataclass
class Times:
    """Of a number of calls."""

    ms: float | None = None
    """Median over the calls, each from its start until the device is done."""
    parts: dict[Key, float] = field(default_factory=dict)
    """Median over the calls of what each partition took in one."""
    steps: dict[Key, float] = field(default_factory=dict)
    """How often one call runs each partition."""
    graphed: dict[Key, float] = field(default_factory=dict)
    """Share of the calls of each captured partition that a graph made, warm-ups left out."""
    warmups: int = 0
    """Calls of partitions that warmed up."""


def live_runs() -> Iterator[tuple[int, telemetry.GraphRun, Any]]:
    """Numbers of graphs, what is known of each, and what runs it as long as that is there."""
    for number, (_, runs) in telemetry.graph_runs().items():
        for run in runs:
            live = run.live()
            if live is not None:
                yield number, run, live


class _Step:
    """Notes when a step begins and ends. Its clock is the device's, where that has one."""

    __slots__ = ("_device", "_key", "_sink", "_start")

    def __init__(self, sink: list[tuple[Key, Any, Any]], key: Key, device: torch.device) -> None:
        self._sink = sink
        self._key = key
        self._device = device

    def __enter__(self) -> None:
        self._start = _now(self._device)

    def __exit__(self, *raised: object) -> None:
        self._sink.append((self._key, self._start, _now(self._device)))


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


_MakeStep = Callable[[Key, torch.device | None], Any]
"""Gives a context for a step of a graph, on a device if it is known."""


class _Watch:
    """An observer of one executor."""

    def __init__(self, make: _MakeStep, number: int, device: torch.device | None) -> None:
        self._make = make
        self._number = number
        self._device = device

    def step(self, name: str) -> Any:
        return self._make((self._number, name), self._device)


@contextlib.contextmanager
def watched(make: _MakeStep) -> Iterator[None]:
    """Have every step of every graph run inside of a context that `make` gives for it."""
    with contextlib.ExitStack() as stack:
        for number, _, live in list(live_runs()):
            device = None if live.owner is None else live.owner.driver.device
            stack.enter_context(live.observed(_Watch(make, number, device)))
        yield


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """The first GPU, or the CPU."""
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def synchronise(devices: Iterable[torch.device]) -> None:
    """Wait until the devices are done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Call(Protocol):
    """What is called again and again."""

    def prepare(self) -> None:
        """Do what comes before a call and is no part of it."""
        ...

    def __call__(self) -> None:
        """Make one call."""
        ...


def timed(call: Call, devices: Iterable[torch.device], runs: int = RUNS) -> Times:
    """Time calls and their steps.

    A step's time is between two events on the stream that it runs on, so it contains waits for the host that launches.

    Args:
        call: Makes one.
        devices: That it uses.
        runs: How many calls count; one more goes before them.
    """
    devices = tuple(devices)
    usual = main_device(devices)
    noted: list[tuple[Key, Any, Any]] = []
    totals: list[float] = []
    sums: dict[Key, list[float]] = defaultdict(list)
    counts: dict[Key, int] = defaultdict(int)
    before: dict[Key, _Counts] = {}
    with watched(lambda key, device: _Step(noted, key, device or usual)):
        for number in range(runs + 1):
            noted.clear()
            call.prepare()
            synchronise(devices)
            start = time.perf_counter()
            call()
            synchronise(devices)
            if number == 0:
                before = _counts()
                continue
            totals.append((time.perf_counter() - start) * 1e3)
            once: dict[Key, float] = defaultdict(float)
            for key, begin, end in noted:
                once[key] += _elapsed_ms(begin, end)
                counts[key] += 1
            for key, ms in once.items():
                sums[key].append(ms)
    made = {key: after - before[key] for key, after in _counts().items() if key in before}
    return Times(
        statistics.median(totals),
        {key: statistics.median(values) for key, values in sums.items()},
        {key: count / runs for key, count in counts.items()},
        {key: each.share for key, each in made.items() if each.calls},
        sum(each.warmups for each in made.values()),
    )


@dataclass(frozen=True)
class _Counts:
    """Of a captured partition."""

    calls: int
    replays: int
    warmups: int

    def __sub__(self, other: "_Counts") -> "_Counts":
        return _Counts(
            self.calls - other.calls, self.replays - other.replays, self.warmups - other.warmups
        )

    @property
    def share(self) -> float:
        """Of the calls but for warm-ups, those that a graph made."""
        counted = self.calls - self.warmups
        return self.replays / counted if counted else 1.0


def _counts() -> dict[Key, _Counts]:
    """Counts of every captured partition."""
    return {
        (number, name): _Counts(part.stats.calls, part.stats.replays, part.stats.warmups)
        for number, (_, runs) in telemetry.graph_runs().items()
        for run in runs
        for name, part in run.parts.items()
    }


@contextlib.contextmanager
def plainly(owners: Iterable[Owner]) -> Iterator[None]:
    """Have compiled functions run their partitions without CUDA graphs inside; these calls are not counted."""
    changed = [owner for owner in owners if not owner.plain]
    mine = set(map(id, changed))
    counts: list[Any] = []
    for _, run, live in live_runs():
        if id(live.owner) in mine:
            counts += [run.tally, *(part.stats for part in run.parts.values())]
    before = [dataclasses.asdict(each) for each in counts]
    for owner in changed:
        owner.plain = True
    try:
        yield
    finally:
        for each, fields in zip(counts, before, strict=True):
            for name, value in fields.items():
                setattr(each, name, value)
        for owner in changed:
            owner.plain = False


def profiled(call: Call, devices: Iterable[torch.device]) -> kernels.Launches:
    """Which kernels one call launches, in CUDA graphs and else; waits for the devices."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    devices = tuple(devices)

    def ranged(key: Key, device: torch.device | None) -> Any:
        del device
        return torch.profiler.record_function(kernels.range_name(*key))

    call.prepare()
    synchronise(devices)
    # Without `acc_events` its constructor warns, once a process, of what only cycles lose.
    profile = torch.profiler.profile(activities=activities, acc_events=True)
    with watched(ranged), profile:
        call()
        synchronise(devices)
    return kernels.launches(kernels.events_of(profile))
