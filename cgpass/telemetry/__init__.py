"""Counters, and the graphs that they are of: what was captured, what was not, how often. No policy."""

import collections
import dataclasses
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cgpass.telemetry.reason import CallReasons, Noted, Reason
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, RecordingNote

GRAPHS_KEPT: Final = 1024
"""Graphs that the summary lists; older ones are counted."""


@dataclass(slots=True)
class CallStats:
    """Event counts of one captured partition. Plain integers: the hot path adds to them."""

    calls: int = 0
    """Calls of a captured partition. One that raises, by an error in it or since `on_skip="raise"` refuses it, counts
    as nothing else."""
    warmups: int = 0
    """Calls that ran without a graph to warm up."""
    recordings: int = 0
    """Recordings made, re-recordings included."""
    rerecordings: int = 0
    """Recordings made because a known input's address moved."""
    replays: int = 0
    """Replays, each recording's first one included."""
    plain_calls: int = 0
    """Calls after warm-up that ran without a graph: a limit, a failed capture, somebody else's capture. Calls of graphs
    of which nothing was to be captured (too small, no CUDA device) are none."""
    copied_bytes: int = 0
    """Bytes copied into placeholders, written back, and copied out of the pool."""
    rescues: int = 0
    """Times that outputs of a recording that were still referenced were copied before a replay would have overwritten them."""
    rescued_bytes: int = 0
    """Bytes copied by rescues."""


@dataclass(slots=True)
class CompileStats:
    """Event counts of compilation."""

    joint_graphs: int = 0
    """Joint graphs split into forward and backward."""
    graphs_kept: int = 0
    """Graphs that AOTAutograd's cache had from an earlier compilation, traced and split."""
    graphs: int = 0
    """Graphs compiled: forward, backward and inference graphs count one each."""
    partitions_captured: int = 0
    """Partitions of these graphs that are captured as things stand now."""
    partitions_eager: int = 0
    """Partitions of these graphs that run without a CUDA graph as things stand now."""
    skips: int = 0
    """Whole graphs and partitions that run without a CUDA graph although one was asked for, since something in them
    can't be captured. Partitions that cgpass itself leaves out, too small ones, are none."""


@dataclass(slots=True)
class Tally:
    """Calls of one graph. A plain integer: the hot path adds to it."""

    calls: int = 0


COUNTS: Final = tuple(spec.name for spec in dataclasses.fields(CallStats))


def counts_of(stats: CallStats) -> dict[str, int]:
    """Counts by name, as they are now."""
    return {name: getattr(stats, name) for name in COUNTS}


class _TrackedStats(CallStats):
    """Counts that stay in the totals after whoever counted is gone."""

    def __del__(self) -> None:
        """Takes no lock: the garbage collector may come while this thread holds it."""
        if not sys.is_finalizing():
            _registry.ended.append([getattr(self, name) for name in COUNTS])


class PartitionRun:
    """What is known of a captured partition's calls; it stays when the partition is gone."""

    def __init__(
        self,
        stats: CallStats,
        notes: Sequence[RecordingNote],
        reasons: CallReasons | None = None,
    ) -> None:
        self.stats = stats
        self.notes = notes
        """Of its newest recordings, oldest first."""
        self.call_reasons = CallReasons() if reasons is None else reasons

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why calls of it ran without a graph, or warmed up again and again."""
        return self.call_reasons.told(counts_of(self.stats))

    def now(self) -> tuple[dict[str, int], Noted]:
        """Its counts and what was noted of its calls, to compare with later."""
        return counts_of(self.stats), self.call_reasons.noted()


@dataclass(frozen=True)
class GraphRun:
    """What runs a compiled graph; kept after that is gone."""

    tally: Tally
    parts: Mapping[str, PartitionRun]
    """Its captured partitions, by their names in the graph."""
    live: weakref.ref[Any]
    """What runs it. The compiled function keeps that alive."""


@dataclass
class _Registry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    compiled: CompileStats = field(default_factory=CompileStats)
    calls: list[weakref.ref[_TrackedStats]] = field(default_factory=list)
    """Kept alive by whoever counts, and by graphs that are listed."""
    named: list[tuple[weakref.ref[_TrackedStats], str]] = field(default_factory=list)
    """Counts of what belongs to no compiled graph."""
    ended: collections.deque[list[int]] = field(default_factory=collections.deque)
    """Of what was collected since it was last added up, in the order of `COUNTS`."""
    past: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    """Sums over what is gone."""
    graphs: dict[int, GraphSummary] = field(default_factory=dict)
    """The newest, by number."""
    runs: dict[int, list[GraphRun]] = field(default_factory=dict)
    """What runs these."""
    steps: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    """Training steps, and their calls when the summary began."""
    functions: int = 0
    since: int = 0
    """Graphs that were compiled before the summary began."""
    calls_before: dict[int, int] = field(default_factory=dict)
    """Calls of these until then."""
    listeners: list[Callable[[int, GraphRun], None]] = field(default_factory=list)

    def sums(self) -> list[int]:
        """Sums over all that ever counted. The lock is held."""
        live = [stats for ref in self.calls if (stats := ref()) is not None]
        if self.ended:
            self.calls = [weakref.ref(stats) for stats in live]
        while self.ended:
            self.past = list(map(operator.add, self.past, self.ended.popleft()))
        return [
            total + sum(getattr(stats, name) for stats in live)
            for name, total in zip(COUNTS, self.past, strict=True)
        ]

    def count(self, parts: Sequence[PartitionSummary], sign: int) -> None:
        """Count partitions, or no longer. The lock is held."""
        self.compiled.partitions_captured += sign * sum(p.captured for p in parts)
        self.compiled.partitions_eager += sign * sum(not p.captured for p in parts)
        self.compiled.skips += sign * sum(p.skipped for p in parts)


_registry = _Registry()

compile_stats = _registry.compiled


def new_call_stats(name: str | None = None) -> CallStats:
    """Counts for one more captured partition; they stay in the totals after it is gone.

    What belongs to no compiled graph has a name: summaries list it by itself.
    """
    stats = _TrackedStats()
    with _registry.lock:
        _registry.sums()
        if name is not None:
            _registry.named = [(ref, each) for ref, each in _registry.named if ref() is not None]
            _registry.named.append((weakref.ref(stats), name))
        _registry.calls.append(weakref.ref(stats))
    return stats


def named_stats() -> list[tuple[str, CallStats]]:
    """Counts of what lives and belongs to no compiled graph, with its names."""
    with _registry.lock:
        return [(name, stats) for ref, name in _registry.named if (stats := ref()) is not None]


def add_step(step: Any) -> None:
    """Have summaries list a training step, as its `explain()` does, as long as it lives."""
    with _registry.lock:
        _registry.steps[step] = 0


def steps() -> list[Any]:
    """Training steps that were called since `begin_summary`."""
    with _registry.lock:
        return [step for step, before in _registry.steps.items() if step.calls > before]


def new_function() -> int:
    """A number for one more function that is compiled; its graphs carry it."""
    with _registry.lock:
        _registry.functions += 1
        return _registry.functions - 1


def add_graph(summary: GraphSummary) -> int:
    """Register a compiled graph; returns its number."""
    with _registry.lock:
        number = _registry.compiled.graphs
        _registry.graphs[number] = summary
        _registry.graphs.pop(number - GRAPHS_KEPT, None)
        _registry.runs.pop(number - GRAPHS_KEPT, None)
        _registry.compiled.graphs += 1
        _registry.count(summary.partitions, 1)
        return number


def add_run(graph: int, run: GraphRun) -> None:
    """Note what runs a graph; nothing is noted of one too old to be listed."""
    with _registry.lock:
        if graph in _registry.graphs:
            _registry.runs.setdefault(graph, []).append(run)
        listeners = list(_registry.listeners)
    for listener in listeners:
        listener(graph, run)


def listen(listener: Callable[[int, GraphRun], None]) -> Callable[[], None]:
    """Have `listener` told of what runs each graph that is compiled from now on, until the result is called."""
    _registry.listeners.append(listener)

    def end() -> None:
        if listener in _registry.listeners:
            _registry.listeners.remove(listener)

    return end


def replace_partition(graph: int, part: PartitionSummary) -> None:
    """Note what the partition of this name is now; nothing is noted of a graph too old to be listed."""
    with _registry.lock:
        summary = _registry.graphs.get(graph)
        if summary is None:
            return
        partitions = tuple(part if p.name == part.name else p for p in summary.partitions)
        _registry.graphs[graph] = dataclasses.replace(summary, partitions=partitions)
        _registry.count(summary.partitions, -1)
        _registry.count(partitions, 1)


def remove_function(function: int) -> None:
    """List the graphs of a function no more, and count their partitions no more: it was compiled again."""
    with _registry.lock:
        for number, summary in list(_registry.graphs.items()):
            if summary.function == function:
                del _registry.graphs[number]
                _registry.runs.pop(number, None)
                _registry.count(summary.partitions, -1)


def counters() -> dict[str, int]:
    """Totals of this process since it began; take differences to count a stretch of calls.

    `partitions_captured`, `partitions_eager` and `skips` say what all graphs compiled so far are now: they also fall,
    as when a function is compiled again after a failed capture, or a partition tried again after `cgpass.reset()`.
    """
    with _registry.lock:
        totals = dataclasses.asdict(_registry.compiled)
        totals.update(zip(COUNTS, _registry.sums(), strict=True))
    return totals


def graph_runs() -> dict[int, tuple[GraphSummary, tuple[GraphRun, ...]]]:
    """The newest graphs by number, oldest first, each with what runs it."""
    with _registry.lock:
        return {
            number: (graph, tuple(_registry.runs.get(number, ())))
            for number, graph in _registry.graphs.items()
        }


def graphs(since: int = 0) -> tuple[GraphSummary, ...]:
    """The graphs compiled in this process, oldest first; at most the newest `GRAPHS_KEPT`.

    Args:
        since: Number of graphs to leave out, as `counters()["graphs"]` gave it.
    """
    return tuple(graph for number, (graph, _) in graph_runs().items() if number >= since)


def calls_of(runs: Sequence[GraphRun]) -> int:
    """Calls of a graph."""
    return sum(run.tally.calls for run in runs)


def begin_summary() -> None:
    """Have summaries list only graphs that are compiled or called from now on."""
    calls = {number: calls_of(runs) for number, (_, runs) in graph_runs().items()}
    with _registry.lock:
        _registry.since, _registry.calls_before = _registry.compiled.graphs, calls
        for step in list(_registry.steps):
            _registry.steps[step] = step.calls


def summarised() -> tuple[int, list[tuple[GraphSummary, tuple[GraphRun, ...]]]]:
    """Graphs that were compiled or called since `begin_summary`, oldest first; and how many are too old to be listed."""
    before, since = _registry.calls_before, _registry.since
    listed = [
        (graph, runs)
        for number, (graph, runs) in graph_runs().items()
        if number >= since or calls_of(runs) > before.get(number, 0)
    ]
    return max(0, _registry.compiled.graphs - GRAPHS_KEPT - since), listed
