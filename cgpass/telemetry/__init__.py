"""Counters, and the graphs that they are of: what was captured, what was not, how often. No policy."""

import dataclasses
import itertools
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from cgpass.telemetry.reason import CallReasons, Noted, excused, many
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, RecordingNote

FIRST_CALL: Final = "the first call of a variant"
RAISED: Final = "the call raised an error"
"""Why calls of training steps run in pieces that are none to judge it by."""


@dataclass(slots=True, eq=False)
class CallStats:
    """Event counts of one captured partition. Plain integers: the hot path adds to them."""

    calls: int = 0
    """Calls of captured partitions. A call that raises, or that `on_skip="raise"` refuses, counts only here."""
    warmups: int = 0
    """Calls that ran without a graph to warm up."""
    recordings: int = 0
    """Recordings made, re-recordings included."""
    rerecordings: int = 0
    """Recordings made because a known input's address moved."""
    replays: int = 0
    """Replays, each recording's first one included."""
    plain_calls: int = 0
    """Calls after warm-up that ran without a graph: a limit, a failed capture, a capture of your own. Graphs that are left
    out as a whole (too small, no CUDA device) don't count."""
    copied_bytes: int = 0
    """Bytes copied into placeholders, written back, and copied out of the pool."""
    rescues: int = 0
    """Times that outputs that were still referenced were copied before a replay overwrote them."""
    rescued_bytes: int = 0
    """Bytes copied by rescues."""


def counts_of(stats: CallStats) -> dict[str, int]:
    """Return all counts by name."""
    return {each.name: getattr(stats, each.name) for each in dataclasses.fields(CallStats)}


@dataclass(slots=True)
class CompileStats:
    """Event counts of compilation."""

    joint_graphs: int = 0
    """Joint graphs split into forward and backward."""
    graphs_kept: int = 0
    """Graphs taken from AOTAutograd's cache, which were traced and split earlier."""
    graphs: int = 0
    """Graphs compiled: forward, backward and inference graphs count one each."""
    partitions_captured: int = 0
    """Partitions of these graphs that are captured now."""
    partitions_eager: int = 0
    """Partitions of these graphs that run without a CUDA graph now."""
    skips: int = 0
    """Graphs and partitions that run without a CUDA graph because something in them can't be captured. Those that cgpass
    leaves out because they are too small don't count."""


@dataclass(eq=False)
class ByHand(CallStats):
    """Counts of what was graphed by hand: it belongs to no compiled graph, and summaries list it by itself."""

    name: str = ""
    why: Counter[str] = field(default_factory=Counter)
    """Causes of calls without a graph, where `reasons` has none."""
    reasons: CallReasons | None = None
    graph_calls = later_calls = 0

    def explain(self) -> str:
        """Describe its calls."""
        counted = f"{many(self.recordings, 'recording')}, {many(self.calls, 'call')}"
        lines = [
            f"{self.name}, graphed by hand: {counted}, {self.plain_calls} of them without a graph"
        ]
        lines += [f"  {count} without a graph: {why}" for why, count in self.why.most_common()]
        if self.reasons is not None:
            lines += [f"  {each}" for each in self.reasons.told(counts_of(self))]
        return "\n".join(lines)


@dataclass(frozen=True)
class Variant:
    """The calls of a variant of a training step; it stays when the variant is gone."""

    stats: CallStats
    reasons: CallReasons
    is_one: bool
    """True if one graph can hold all of it."""
    reads: Callable[[], Callable[[], str] | None]
    """A weak reference to a method that describes the graph's inputs."""

    def explain(self) -> str:
        """Describe its calls, and its graph's inputs while it lives."""
        stats, reads = self.stats, self.reads()
        about = (
            f"{'one graph' if self.is_one else 'a graph of the update'}, recorded {many(stats.recordings, 'time')} and "
            f"replayed {many(stats.replays, 'time')}"
        )
        about += "" if reads is None else f": {reads()}"
        return "\n".join(f"  {each}" for each in (about, *self.reasons.told(counts_of(stats))))


@dataclass(eq=False)
class StepCalls:
    """Counts of a training step. It holds nothing of the user's, and stays when the step is gone."""

    name: str
    calls: int = 0
    whole_calls: int = 0
    in_pieces: Counter[str] = field(default_factory=Counter)
    variants: list[Variant] = field(default_factory=list)

    @property
    def later_calls(self) -> int:
        """Calls but for the first of each variant, and those that raised."""
        return self.calls - self.in_pieces[FIRST_CALL] - self.in_pieces[RAISED]

    @property
    def graph_calls(self) -> int:
        """Calls as a whole but for those without the graph."""
        counts = [counts_of(each.stats) for each in self.variants if each.is_one]
        excuses = sum(excused(each) for each in counts if each["recordings"])
        return self.whole_calls + excuses - sum(c["plain_calls"] + c["warmups"] for c in counts)

    def explain(self) -> str:
        """Describe its calls, a line each."""
        pieces = self.calls - self.whole_calls
        lines = [
            f"{self.name}: {many(self.calls, 'call')}, {self.whole_calls} as a whole, {pieces} in pieces"
        ]
        lines += [f"  {number} in pieces: {why}" for why, number in self.in_pieces.most_common()]
        return "\n".join(lines + [each.explain() for each in self.variants if each.stats.calls])


@dataclass(frozen=True)
class PartitionRun:
    """The calls of a captured partition; it stays when the partition is gone."""

    stats: CallStats
    notes: Sequence[RecordingNote]
    """Of its newest recordings, oldest first."""
    reasons: CallReasons


@dataclass(frozen=True)
class GraphRun:
    """The runs of a compiled graph; kept after that is gone."""

    tally: CallStats
    """Counts the calls of the whole graph."""
    parts: Mapping[str, PartitionRun]
    """Its captured partitions, by their names in the graph."""
    live: weakref.ref[Any]
    """Its executor; the compiled function keeps that alive."""


@dataclass(frozen=True)
class Moment:
    """Counts of a moment; what came later is told by the differences."""

    counters: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[int, int] = field(default_factory=dict)
    """Of graphs, by number."""
    parts: Mapping[tuple[int, str], tuple[dict[str, int], Noted]] = field(default_factory=dict)
    """Counts of captured partitions and what was noted of their calls, by graph and name."""
    others: Mapping[ByHand | StepCalls, tuple[int, int, int]] = field(default_factory=dict)
    """Of training steps and what was graphed by hand: calls, those that were one graph, and all but first ones."""


@dataclass
class _Registry:
    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal may come inside
    compiled: CompileStats = field(default_factory=CompileStats)
    calls: list[CallStats] = field(default_factory=list)
    """Of all that ever counted: a few numbers each, which stay in the totals."""
    graphs: dict[int, tuple[GraphSummary, tuple[GraphRun, ...]]] = field(default_factory=dict)
    """By number, oldest first, each with what runs it."""
    others: list[ByHand | StepCalls] = field(default_factory=list)
    """Training steps and what was graphed by hand, which summaries list as their `explain()` does."""
    since: Moment = field(default_factory=Moment)
    """The counts when the summary began."""
    listeners: list[Callable[[int, GraphRun], object]] = field(default_factory=list)


_registry = _Registry()

compile_stats = _registry.compiled


def add_stats(stats: CallStats | StepCalls) -> None:
    """Count one more captured partition, what is graphed by hand, or a training step."""
    with _registry.lock:
        if isinstance(stats, CallStats):
            _registry.calls.append(stats)
        if isinstance(stats, ByHand | StepCalls):
            _registry.others.append(stats)


new_function: Final = itertools.count().__next__
"""Gives a number for one more function that is compiled; its graphs carry it."""


def add_graph(summary: GraphSummary) -> int:
    """Register a compiled graph; returns its number."""
    with _registry.lock:
        number = _registry.compiled.graphs
        _registry.graphs[number] = summary, ()
        _registry.compiled.graphs += 1
        return number


def add_run(graph: int, run: GraphRun) -> None:
    """Note the runner of a graph."""
    with _registry.lock:
        if graph in _registry.graphs:
            summary, runs = _registry.graphs[graph]
            _registry.graphs[graph] = summary, (*runs, run)
        listeners = list(_registry.listeners)
    for listener in listeners:
        listener(graph, run)


def listen(listener: Callable[[int, GraphRun], object], until: ExitStack) -> None:
    """Have `listener` told of what runs each graph, now and later, until a stack is closed; it is where this raises."""
    known = _registry.listeners
    for _ in range(2):  # a signal may come inside
        until.callback(lambda: listener in known and known.remove(listener))
    try:
        known.append(listener)
        for number, (_, runs) in graph_runs().items():
            for run in runs:
                listener(number, run)
    except BaseException:
        until.close()
        raise


def replace_partition(graph: int, part: PartitionSummary) -> None:
    """Note the new state of the partition of this name."""
    with _registry.lock:
        if graph in _registry.graphs:
            summary, runs = _registry.graphs[graph]
            partitions = tuple(part if p.name == part.name else p for p in summary.partitions)
            _registry.graphs[graph] = dataclasses.replace(summary, partitions=partitions), runs


def remove_function(function: int) -> None:
    """List the graphs of a function no more, and count their partitions no more: it was compiled again."""
    with _registry.lock:
        for number, (summary, _) in list(_registry.graphs.items()):
            if summary.function == function:
                del _registry.graphs[number]


def counters() -> dict[str, int]:
    """Return the totals of this process; subtract two readings to count the calls in between.

    `partitions_captured`, `partitions_eager` and `skips` describe the present state of all graphs. They can also fall, for
    example when a function is compiled again after a failed capture.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4).eval(), backend="cgpass")
        >>> before = cgpass.counters()["replays"]
        >>> with torch.no_grad():
        ...     results = [compiled(torch.randn(2, 4)) for _ in range(5)]
        >>> cgpass.counters()["replays"] - before  # the first call warmed up
        4
    """
    with _registry.lock:
        counts = dataclasses.asdict(_registry.compiled)
        for spec in dataclasses.fields(CallStats):
            counts[spec.name] = sum(getattr(stats, spec.name) for stats in _registry.calls)
        parts = [part for graph, _ in _registry.graphs.values() for part in graph.partitions]
    counts["partitions_captured"] = sum(part.captured for part in parts)
    eager = [part for part in parts if not part.captured]
    counts["partitions_eager"] = len(eager)
    counts["skips"] += sum(not all(each.is_chosen for each in part.reasons) for part in eager)
    return counts


def grown(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """Growth of each count; what was not there before was zero."""
    return {name: count - before.get(name, 0) for name, count in now.items()}


def graph_runs() -> dict[int, tuple[GraphSummary, tuple[GraphRun, ...]]]:
    """All graphs by number, oldest first, each with what runs it."""
    with _registry.lock:
        return dict(_registry.graphs)


def graphs(since: int = 0) -> tuple[GraphSummary, ...]:
    """The graphs compiled in this process but for so many, oldest first."""
    return tuple(graph for number, (graph, _) in graph_runs().items() if number >= since)


def now() -> Moment:
    """Look at all counts."""
    runs = graph_runs().items()
    parts = {
        (number, name): (counts_of(part.stats), part.reasons.noted())
        for number, (_, each) in runs
        for run in each
        for name, part in run.parts.items()
    }
    calls = {number: sum(run.tally.calls for run in each) for number, (_, each) in runs}
    with _registry.lock:
        others = {x: (x.calls, x.graph_calls, x.later_calls) for x in _registry.others}
    return Moment(counters(), calls, parts, others)


def told(other: ByHand | StepCalls, calls: int) -> str:
    """Describe a training step, or what was graphed by hand, and how many of its calls a report is about."""
    some = f"\n  {calls} of these calls ran since this report began"
    return other.explain() + some * (calls < other.calls)


def begin_summary() -> None:
    """Have summaries tell of calls from now on alone."""
    _registry.since = now()


def summary_began() -> Moment:
    """Give the moment of the last `begin_summary`."""
    return _registry.since


class NamedWarnings(logging.Handler):
    """Prints warnings with our name before them where nobody set up logging; Python would print them bare."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record that no other handler takes."""
        others = logging.root.handlers or logging.getLogger("cgpass").handlers != [self]
        if sys.stderr is not None and logging.lastResort is not None and not others:
            text = self.format(record)
            sys.stderr.write(f"{'' if text.startswith('cgpass') else 'cgpass: '}{text}\n")
