"""Watch the calls in a block: compare telemetry's counts before and after it.

On the CPU the calls run no code of it. On CUDA events around partitions time a sample of calls on the device.
"""

import contextlib
import functools
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from cgpass import telemetry, torch_private
from cgpass.compile.facts.breaks import (
    callers,
    graph_breaks,
    left_to_eager,
    recompiled,
)
from cgpass.compile.facts.lines import place_of
from cgpass.options import current_defaults
from cgpass.report.model import CopiedInput, GraphReport, PartitionReport
from cgpass.report.report import Report
from cgpass.runtime import native
from cgpass.runtime.executor import Executor, Run, Step
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry import CallStats
from cgpass.telemetry.reason import Reason, excused
from cgpass.telemetry.summaries import counted
from cgpass.version import VERSION

Key = tuple[telemetry.Graph, str]
"""A graph, and the name of one of its partitions."""

_SPACING: Final = 32
"""Of so many periods one is timed on average; of the first ones more."""
_LONGEST: Final = 512
"""Calls of partitions in a period; one that is longer is given up."""
_TIMED: Final = 4096
"""Calls of partitions in a block from which on no more are timed."""
_COMPARED: Final = 5
"""Calls that are timed with graphs, and without."""
SIMULATED: Final = "cpu (simulated graphs: they behave like real ones, their speed means nothing)"


@contextlib.contextmanager
def watched() -> Iterator[Report]:
    """A block that is reported; the report is filled when it ends, also by an error."""
    report = Report()
    breaks = {each: each.over for each in torch_private.graph_breaks()}
    notes = torch_private.compilations()
    with _Clock() as clock:
        telemetry.listen(clock.add, clock)
        before = telemetry.now()
        try:
            yield report
        finally:
            clock.stop()
            vars(report).update(vars(_report(before, breaks, notes, clock)))


def since_reset() -> Report:
    """Report all that ran since `cgpass.reset()`, or since the process began."""
    breaks = {each: each.over for each in torch_private.graph_breaks() if each.earlier}
    return _report(telemetry.registry.since, breaks, torch_private.compilations(), _Clock())


@torch_private.outside_dynamo  # which would trace the end of a block in a compiled function
def _report(
    before: telemetry.Moment,
    breaks: Mapping[torch_private.GraphBreak, bool],
    notes: Sequence[Any],
    clock: "_Clock",
) -> Report:
    """Report what came after a moment; until then torch had noted some graph breaks (True: forgotten) and compilations."""
    after = telemetry.now()
    called = telemetry.grown(after.calls, before.calls).items()
    graphs = [_graph(graph, calls, before, clock) for graph, calls in called if calls]
    since = telemetry.registry.since.counters.get("graphs", 0)
    met = graph_breaks(breaks, graphs)
    called_at = callers(graph.summary for graph in telemetry.graphs(since))
    left = left_to_eager(notes, called_at)
    told = {(each.line, each.detail) for each in left}
    left += [r for r in met if r.rest is not None and (r.line, r.detail) not in told]
    others = {
        each: telemetry.grown(n, before.others.get(each, {})) for each, n in after.others.items()
    }
    others = {each: counts for each, counts in others.items() if counts["calls"]}
    steps = [Counter(counts) for counts in others.values() if "later" in counts]
    pools = [n for owner in owners(before) if (n := owner.driver.pool_bytes()) is not None]
    on_cuda = torch.cuda.is_initialized()  # asking for the name would do that
    drivers = {each.driver for each in (*graphs, *others) if getattr(each, "driver", None)}
    simulated = "simulated" in (drivers or {current_defaults().driver})
    return Report(
        cgpass=VERSION,
        torch=torch.__version__,
        device=SIMULATED if simulated else torch.cuda.get_device_name() if on_cuda else "cpu",
        made=time.strftime("%Y-%m-%d %H:%M"),
        command=" ".join(sys.argv),
        model=next((graph.place for graph in graphs if graph.place), ""),
        graphs=tuple(graphs),
        left_to_eager=tuple(dict.fromkeys(left)),
        graph_breaks=counted(
            r for r in met if r.rest is None and not any(_is_same(r, each) for each in left)
        ),
        recompilations=tuple(recompiled(notes, called_at, left)),
        others=tuple(telemetry.told(each, counts["calls"]) for each, counts in others.items()),
        whole_steps=sum(counts["replays"] for counts in steps),
        steps=sum(counts["later"] - excused(counts) for counts in steps),
        counters=telemetry.grown(after.counters, before.counters),
        native=native.loader.status,
        pool_bytes=sum(pools) if pools else None,
        graphs_ms=min(clock.in_graphs, clock.whole) if clock.whole else None,  # of two streams
        device_ms=clock.whole or None,
    )


def _is_same(one: Reason, other: Reason) -> bool:
    """Tell whether two graph breaks are one, unless they were reached from different lines."""
    place, reached = place_of(one.line) == place_of(other.line), ", reached from"
    same = one.detail.partition(", ")[0] == other.detail.partition(", ")[0]
    both = reached in one.detail and reached in other.detail
    return place and same and (one.detail == other.detail or not both)


def live(graphs: Iterable[telemetry.Graph]) -> list[Executor]:
    """Executors of graphs that still live."""
    return [each for graph in graphs if isinstance(each := graph.live(), Executor)]


def owners(before: telemetry.Moment) -> list[Owner]:
    """Owners of graphs that live, and were called since."""
    calls = telemetry.grown(telemetry.now().calls, before.calls)
    called = live(graph for graph in calls if calls[graph])
    return [*dict.fromkeys(each.owner for each in called if each.owner)]


def _graph(
    graph: telemetry.Graph, calls: int, before: telemetry.Moment, clock: "_Clock"
) -> GraphReport:
    summary, captured, warmups = graph.summary, dict[str, dict[str, Any]](), 0
    for name, part in graph.parts.items():
        counts, noted = before.parts.get((graph, name), ({}, None))
        grown = telemetry.grown(telemetry.counts_of(part.stats), counts)
        warmups = max(warmups, excused(grown))
        notes = list(part.notes)[max(0, len(part.notes) - grown["recordings"]) :]
        if summary.driver == "simulated":  # times of what is simulated say nothing
            notes = [replace(note, record_ms=None) for note in notes]
        ended = grown["replays"] + grown["plain_calls"] + grown["warmups"]
        captured[name] = {
            "calls": ended - excused(grown),
            "raised": grown["calls"] - ended,
            "counts": grown,
            "recordings": tuple(notes),
            "reasons": part.reasons.told(grown, noted),
        }
    for step in (step for executor in live([graph]) for step in executor.plan.steps):
        if isinstance(step.run, PartitionRunner):
            captured[step.name] |= _memory(step.run)
    parts, reached = list[PartitionReport](), max(0, calls - warmups)
    for part in summary.partitions:
        own = captured.get(part.name, {}) if part.captured else {}
        reached = max(0, reached - own.pop("raised", 0))  # by nothing behind it
        about = vars(part) | {"calls": reached, "reasons": counted(part.reasons)} | own
        parts.append(PartitionReport(**about, device_ms=clock.parts.get((graph, part.name))))
    ops = summary.num_ops or sum(part.num_ops for part in parts)
    told: dict[str, Any] = vars(summary) | {"why": counted(summary.why), "num_ops": ops}
    return GraphReport(**told | {"partitions": tuple(parts), "calls": calls})


def _memory(runner: PartitionRunner) -> dict[str, Any]:
    """Look at the inputs and recordings of a partition that lives."""
    infos, recordings, latest = runner.layout.infos, runner.table.all(), runner.copied_inputs
    statics = runner.layout.parameters
    told: dict[str, Any] = {"static_inputs": len(statics), "returned_at": runner.returned_at}
    copied = [
        CopiedInput(name=infos[i].name, num_bytes=n, line=infos[i].line, moved=i in statics)
        for i, n in latest.items()
    ]
    told["copied_inputs"] = tuple(sorted(copied, key=lambda each: -each.num_bytes))
    if recordings:
        told["output_bytes"] = sum(recording.memory.num_bytes() for recording in recordings)
    return told


_Timed = tuple[Key, Any, Any, bool]
"""A call: of which partition, the events before and after it, and whether a graph made it."""


class _Clock(contextlib.ExitStack):
    """Times on CUDA of a sample of periods, each from one call of a partition to its next one.

    In a period every call of a partition is timed, and what runs between them is part of it: so time inside graphs and
    all of the time are measured alike. To record an event takes the host about 10 us, hence no more than a sample.
    Periods in which something is compiled, warmed up or recorded are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[Key, float] = {}
        """Mean milliseconds of a call of each partition."""
        self.in_graphs = self.whole = 0.0
        """Milliseconds of all periods, inside graphs and as a whole."""
        self._skips = self._ended = self._timed = 0
        self._period: list[_Timed] = []
        self._periods: list[tuple[list[_Timed], Any]] = []
        self._random = random.Random(0)

    def add(self, graph: telemetry.Graph) -> None:
        """Time what runs a graph, which may be new."""
        self._end_period(self._period, None)
        for each in live([graph]):
            if each.owner and (device := each.owner.driver.device).type == "cuda":
                each.wrap(functools.partial(self._wrapped, graph, device), self)

    def _wrapped(self, graph: telemetry.Graph, device: torch.device, step: Step, run: Run) -> Run:
        stats = step.run.stats if isinstance(step.run, PartitionRunner) else CallStats()
        key = graph, step.name

        def timed(values: list[Any]) -> Any:
            if self._skips > 0:
                self._skips -= 1
                return run(values)
            period, settled = self._period, (stats.warmups, stats.recordings)
            if torch.cuda.is_current_stream_capturing() or not (period or stats.replays):
                return run(values)
            begin = _event(device)
            if period and key == period[0][0]:
                self._end_period(period, begin)
                return run(values)
            result = run(values)
            period.append((key, begin, _event(device), result[1] is not None))
            if settled != (stats.warmups, stats.recordings) or len(period) >= _LONGEST:
                self._end_period(period, None)
            return result

        return timed

    def _end_period(self, period: list[_Timed], end: Any) -> None:
        """Keep a period if it has an end, and choose when the next one begins.

        Not at fixed distances: what comes only every few steps, as an optimizer, would be in all periods or in none.
        """
        if not period or period is not self._period:  # it ended already
            return
        self._period = []
        if end is not None:
            self._periods.append((period, end))
        self._ended += 1
        self._timed += len(period)
        periods = min(self._ended**2, _SPACING)
        self._skips = self._random.randrange(2 * len(period) * periods)
        if self._timed >= _TIMED:
            self._skips = sys.maxsize

    def stop(self) -> None:
        """Wait for the device, and add up."""
        times: dict[Key, list[float]] = defaultdict(list)
        for period, end in self._periods:
            end.synchronize()
            self.whole += period[0][1].elapsed_time(end)
            for key, begin, after, in_graph in period:
                after.synchronize()
                times[key].append(took := begin.elapsed_time(after))
                self.in_graphs += took * in_graph
        self.parts = {key: statistics.fmean(each) for key, each in times.items()}


def _event(device: torch.device) -> Any:
    """Record an event where graphs of the device replay, which need not be the current device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def compared(call: Callable[[], object]) -> tuple[float, float]:
    """Mean milliseconds of a call with CUDA graphs and without; the latter are not counted."""
    ms = _mean_ms(call)
    changed = [owner for owner in owners(telemetry.Moment()) if not owner.plain]
    graphs = telemetry.graphs()
    counting = [graph.tally for graph in graphs]
    counting += [part.stats for graph in graphs for part in graph.parts.values()]
    before = [(each, name, getattr(each, name)) for each in counting for name in each.__slots__]
    try:
        for owner in changed:
            owner.plain = True
        return ms, _mean_ms(call)
    finally:
        for owner in changed:
            owner.plain = False
        for count in before:
            setattr(*count)


def _mean_ms(call: Callable[[], object]) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(_COMPARED):
        call()
    synchronize()
    return (time.perf_counter() - start) / _COMPARED * 1e3
