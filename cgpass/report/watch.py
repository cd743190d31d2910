"""Watch the calls in a block: compare telemetry's counts before and after it; the calls themselves run no code of it.

On CUDA pairs of events around partitions tell their times on the device, of the first thousands of calls.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Self

import torch
from torch.utils.benchmark import Timer

from cgpass import telemetry, torch_private
from cgpass.compile.facts.breaks import graph_breaks, left_to_eager, place_of, recompiled
from cgpass.options import Options
from cgpass.report.model import CopiedInput, GraphReport, PartitionReport
from cgpass.report.report import Report
from cgpass.runtime import native
from cgpass.runtime.executor import Executor, Run, Step
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry.reason import excused
from cgpass.telemetry.summaries import GraphSummary, counted
from cgpass.version import VERSION

Key = tuple[int, str]
"""Number of a graph, and the name of one of its partitions."""

_TIMED: Final = 4096
"""Calls of partitions in one block that events are recorded around."""
_COMPARED: Final = 5
"""Calls that are timed with graphs, and without."""
SIMULATED: Final = "cpu (simulated graphs: they behave like real ones, their speed means nothing)"


@contextlib.contextmanager
def watched() -> Iterator[Report]:
    """A block that is reported; the report is filled when it ends, also by an error."""
    report = Report(unfinished=True)
    breaks, notes = {*torch_private.graph_breaks()}, torch_private.compilations()
    with _Clock() as clock:
        before = telemetry.now()
        try:
            yield report
        finally:
            clock.stop()
            vars(report).update(vars(_report(before, breaks, notes, clock)))


def since_reset() -> Report:
    """Report all that ran since `cgpass.reset()`, or since the process began."""
    breaks = {each for each in torch_private.graph_breaks() if each.earlier}
    return _report(telemetry.summary_began(), breaks, torch_private.compilations(), _Clock())


def _report(
    before: telemetry.Moment,
    breaks: Collection[torch_private.GraphBreak],
    notes: Sequence[Any],
    clock: "_Clock",
) -> Report:
    """Report what came after a moment; until then torch had noted some graph breaks and compilations."""
    after, graphs, owners = telemetry.now(), list[GraphReport](), dict[int, Owner]()
    for number, (summary, runs) in telemetry.graph_runs().items():
        if calls := after.calls.get(number, 0) - before.calls.get(number, 0):
            graphs.append(_graph(number, summary, runs, calls, before, clock))
            owners.update((id(each.owner), each.owner) for each in live(runs) if each.owner)
    met, left = graph_breaks(breaks, graphs)
    left = [*left_to_eager(notes), *left]
    known = {place_of(each.line) for each in left}
    others = {
        each: [now - then for now, then in zip(counts, was, strict=True)]
        for each, counts in after.others.items()
        if (was := before.others.get(each, (0, 0, 0)))[0] < counts[0]
    }
    pools = [n for owner in owners.values() if (n := owner.driver.pool_bytes()) is not None]
    on_cuda = torch.cuda.is_initialized()  # asking for the name would do that
    simulated = "simulated" in ({g.driver for g in graphs} - {None} or {Options.parse(None).driver})
    return Report(
        cgpass=VERSION,
        torch=torch.__version__,
        device=SIMULATED if simulated else torch.cuda.get_device_name() if on_cuda else "cpu",
        made=time.strftime("%Y-%m-%d %H:%M"),
        command=" ".join(sys.argv),
        model=next((graph.place for graph in graphs if graph.place), ""),
        graphs=tuple(graphs),
        left_to_eager=tuple(dict.fromkeys(left)),
        graph_breaks=counted(each for each in met if place_of(each.line) not in known),
        recompilations=tuple(r for r in recompiled(notes) if place_of(r.line) not in known),
        others=tuple(each.explain() for each in others),
        whole_steps=sum(whole for _, whole, _ in others.values()),
        steps=sum(later for _, _, later in others.values()),
        counters=telemetry.grown(after.counters, before.counters),
        native=native.loader.status,
        pool_bytes=sum(pools) if pools else None,
        graphs_ms=clock.in_graphs if clock.device_ms else None,
        device_ms=clock.device_ms,
    )


def live(runs: Iterable[telemetry.GraphRun]) -> list[Executor]:
    """Executors of a graph that still live."""
    return [each for run in runs if isinstance(each := run.live(), Executor)]


def _graph(
    number: int,
    summary: GraphSummary,
    runs: tuple[telemetry.GraphRun, ...],
    calls: int,
    before: telemetry.Moment,
    clock: "_Clock",
) -> GraphReport:
    captured, warmups = dict[str, dict[str, Any]](), 0
    for name, part in (item for run in runs for item in run.parts.items()):
        counts, noted = before.parts.get((number, name), ({}, None))
        grown = telemetry.grown(dataclasses.asdict(part.stats), counts)
        warmups = max(warmups, excused(grown))
        notes = list(part.notes)[max(0, len(part.notes) - grown["recordings"]) :]
        if summary.driver == "simulated":  # times of what is simulated say nothing
            notes = [replace(note, record_ms=None, warm_up_ms=None) for note in notes]
        captured[name] = {
            "calls": grown["calls"] - excused(grown),
            "replays": grown["replays"],
            "counts": grown,
            "recordings": tuple(notes),
            "reasons": part.reasons.told(grown, noted),
        }
    for step in (step for executor in live(runs) for step in executor.plan.steps):
        if isinstance(step.run, PartitionRunner):
            captured[step.name] |= _memory(step.run)
    parts = tuple(
        PartitionReport(
            **vars(part)
            | {"calls": max(0, calls - warmups), "reasons": counted(part.reasons)}
            | (captured.get(part.name, {}) if part.captured else {}),
            device_ms=clock.parts.get((number, part.name)),
        )
        for part in summary.partitions
    )
    ops = summary.num_ops or sum(part.num_ops for part in parts)
    told: dict[str, Any] = {"partitions": parts, "why": counted(summary.why)}
    told |= {"num_ops": ops, "calls": calls}
    return GraphReport(**vars(summary) | told)


def _memory(runner: PartitionRunner) -> dict[str, Any]:
    """Look at the inputs and recordings of a partition that lives."""
    infos, recordings = runner.layout.infos, runner.table.all()
    statics = runner.layout.parameters
    told: dict[str, Any] = {"static_inputs": len(statics)}
    if recordings:
        newest = max(recordings, key=lambda recording: recording.birth)
        copied = [
            CopiedInput(name=infos[i].name, num_bytes=n, line=infos[i].line, moved=i in statics)
            for i, n in newest.copied_inputs.items()
        ]
        told["copied_inputs"] = tuple(sorted(copied, key=lambda each: -each.num_bytes))
        told["output_bytes"] = sum(recording.memory.num_bytes() for recording in recordings)
    return told


class _Clock:
    """Times of partitions on CUDA."""

    def __init__(self) -> None:
        self.parts: dict[Key, float] = {}
        """Milliseconds of each partition, all its calls together."""
        self.in_graphs = 0.0
        self.device_ms: float | None = None
        self._pairs: list[tuple[Key, Any, Any, bool]] = []
        self._begin: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if torch.cuda.is_initialized():
            self._begin = _event()
        self._stack.callback(telemetry.listen(self._add))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _add(self, number: int, run: telemetry.GraphRun) -> None:
        for each in live([run]):
            if each.owner is not None and each.owner.driver.device.type == "cuda":
                self._stack.callback(each.wrap(functools.partial(self._wrapped, number)))

    def _wrapped(self, number: int, step: Step, run: Run) -> Run:
        def timed(values: list[Any]) -> Any:
            if len(self._pairs) >= _TIMED or torch.cuda.is_current_stream_capturing():
                return run(values)
            begin = _event()
            result = run(values)
            self._pairs.append(((number, step.name), begin, _event(), result[1] is not None))
            return result

        return timed

    def stop(self) -> None:
        """Wait for the device, and add up."""
        if not self._pairs:
            return
        full = len(self._pairs) >= _TIMED
        end = self._pairs[-1][2] if full else _event()
        torch.cuda.synchronize()
        parts: dict[Key, float] = defaultdict(float)
        for key, begin, stop, graphed in self._pairs:
            took = begin.elapsed_time(stop)
            parts[key] += took
            self.in_graphs += took * graphed
        self.parts = dict(parts)
        self.device_ms = (self._begin or self._pairs[0][1]).elapsed_time(end)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def compared(call: Callable[[], object], owners: Iterable[Owner]) -> tuple[float, float]:
    """Mean milliseconds of a call with CUDA graphs and without; the latter are not counted."""
    threads = torch.get_num_threads()  # Dynamo's guards look at it
    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    ms = timer.timeit(_COMPARED).mean * 1e3
    changed = [owner for owner in owners if not owner.plain]
    runs = [run for _, found in telemetry.graph_runs().values() for run in found]
    counting = [
        each for run in runs for each in (run.tally, *(p.stats for p in run.parts.values()))
    ]
    before = [(each, name, getattr(each, name)) for each in counting for name in each.__slots__]
    try:
        for owner in changed:
            owner.plain = True
        return ms, timer.timeit(_COMPARED).mean * 1e3
    finally:
        for owner in changed:
            owner.plain = False
        for count in before:
            setattr(*count)
