"""Counters, and the graphs that they are of: what was captured, what was not, how often. No policy."""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from cgpass.telemetry.reason import FEW_SIZES, CallReasons, Noted, many
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, RecordingNote

FIRST_CALL: Final = "the first call of a variant"
RAISED: Final = "the call raised an error"
NOT_JUDGED: Final = (FIRST_CALL, RAISED, "accumulate=")
"""Beginnings of why calls of training steps run in pieces that are none to judge it by."""


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
    """Recordings made because an input's address moved; of graphed callables, calls that recorded again."""
    replays: int = 0
    """Replays, each recording's first one included."""
    plain_calls: int = 0
    """Calls after warm-up that ran without a graph: a limit, a failed capture, a capture of your own. Graphs that are left
    out as a whole (too small, no CUDA device) don't count."""
    copied_bytes: int = 0
    """Bytes copied into placeholders, written back, and copied for `outputs="owned"`."""
    rescues: int = 0
    """Times that outputs that were still referenced were copied before a replay overwrote them."""
    rescued_bytes: int = 0
    """Bytes copied by rescues."""

    def rescued(self) -> list[str]:
        """Say how often results were copied because they were still referenced."""
        copied = f"copied {many(self.rescues, 'time')} ({self.rescued_bytes:,} bytes)"
        told = f"results or gradients still referenced were {copied}; drop them before the next call to save this"
        return [told] * bool(self.rescues)


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
    driver: str = ""
    why: Counter[str] = field(default_factory=Counter)
    """Calls without a graph, where `reasons` has none, and further recordings, with causes."""
    reasons: CallReasons | None = None

    def explain(self) -> str:
        """Describe its calls."""
        how = f"{many(self.recordings, 'recording')}, {many(self.calls, 'call')}"
        lines = [f"{self.name}, graphed by hand: {how}, {self.plain_calls} of them without a graph"]
        lines += [f"{count} {why}" for why, count in self.why.most_common()]
        lines += map(str, self.reasons.told(counts_of(self)) if self.reasons else ())
        return "\n  ".join([*lines, *self.rescued()])


@dataclass(frozen=True)
class PartitionRun:
    """The calls of a captured partition; it stays when the partition is gone."""

    stats: CallStats
    notes: Sequence[RecordingNote]
    """Of its newest recordings, oldest first."""
    reasons: CallReasons


@dataclass(frozen=True)
class Variant(PartitionRun):
    """The calls of a variant of a training step."""

    is_one: bool
    """True if one graph can hold all of it."""
    reads: str
    """The graph's inputs."""

    def explain(self) -> str:
        """Describe its calls, and its graph's inputs."""
        stats, again = self.stats, Counter(n.detail for n in self.notes if n.cause != "first")
        about = (
            f"{'one graph' if self.is_one else 'a graph of the update'}, recorded {many(stats.recordings, 'time')} and "
            f"replayed {many(stats.replays, 'time')}: {self.reads}"
        )
        told = {why: f"{why}; {FEW_SIZES}" if ".size(" in why else why for why in again}
        causes = [f"{many(n, 'recording')}: {told[why]}" for why, n in again.most_common()]
        causes += [*map(str, self.reasons.told(counts_of(stats))), *stats.rescued()]
        return "\n".join(f"  {each}" for each in (about, *causes))


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
        """Calls but for the first of each variant, those that accumulate, and those that raised."""
        unjudged = [n for why, n in self.in_pieces.items() if why.startswith(NOT_JUDGED)]
        return self.calls - sum(unjudged)

    def counted(self) -> dict[str, int]:
        """Return the counts of whole steps, all calls, and `later` ones."""
        totals = sum((Counter(counts_of(v.stats)) for v in self.variants if v.is_one), Counter())
        return dict(totals) | {"calls": self.calls, "later": self.later_calls}

    def explain(self) -> str:
        """Describe its calls, a line each."""
        ways = f"{self.whole_calls} as a whole, {self.calls - self.whole_calls} in pieces"
        lines = [f"{self.name}: {many(self.calls, 'call')}, {ways}"]
        lines += [f"  {number} in pieces: {why}" for why, number in self.in_pieces.most_common()]
        return "\n".join(lines + [each.explain() for each in self.variants if each.stats.calls])


@dataclass(eq=False)
class Graph:
    """A compiled graph and its runs; kept after that is gone."""

    summary: GraphSummary
    tally: CallStats = field(default_factory=CallStats)
    """Counts the calls of the whole graph."""
    parts: Mapping[str, PartitionRun] = field(default_factory=dict)
    """Its captured partitions, by their names in the graph."""
    live: Callable[[], Any] = lambda: None
    """A weak reference to its executor; the compiled function keeps that alive."""
    is_replaced: bool = False
    """True if its function was compiled again; then nothing lists it, or counts its partitions."""

    def replace(self, part: PartitionSummary) -> None:
        """Note the new state of the partition of this name."""
        partitions = tuple(part if p.name == part.name else p for p in self.summary.partitions)
        self.summary = dataclasses.replace(self.summary, partitions=partitions)


@dataclass(frozen=True)
class Moment:
    """Counts of a moment; what came later is told by the differences."""

    counters: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[Graph, int] = field(default_factory=dict)
    parts: Mapping[tuple[Graph, str], tuple[dict[str, int], Noted]] = field(default_factory=dict)
    """Counts of captured partitions and what was noted of their calls, by graph and name."""
    others: Mapping[ByHand | StepCalls, dict[str, int]] = field(default_factory=dict)
    """Of what was graphed by hand, and training steps, whose `later` calls are counted, too."""


@dataclass
class Registry:
    """Everything that is counted. Threads only append to its lists, so that none needs a lock."""

    compiled: CompileStats = field(default_factory=CompileStats)
    counts: list[CallStats | StepCalls] = field(default_factory=list)
    """Of each captured partition, what is graphed by hand and training step: a few numbers, which stay in the totals."""
    graphs: list[Graph] = field(default_factory=list)
    """Of all that were ever compiled, oldest first."""
    since: Moment = field(default_factory=Moment)
    """The counts when the summary began."""
    listeners: list[Callable[[Graph], object]] = field(default_factory=list)


registry = Registry()


new_function: Final = itertools.count().__next__
"""Gives a number for one more function that is compiled; its graphs carry it."""


def add_graph(summary: GraphSummary) -> Graph:
    """Register a compiled graph."""
    graph = Graph(summary)
    registry.graphs.append(graph)
    return graph


def tell(graph: Graph) -> None:
    """Tell who listens that a graph can run."""
    for listener in list(registry.listeners):
        listener(graph)


def listen(listener: Callable[[Graph], object], until: ExitStack) -> None:
    """Have `listener` told of each graph, now and later, until a stack is closed; it is where this raises."""
    known = registry.listeners
    for _ in range(2):  # a signal may come inside
        until.callback(lambda: listener in known and known.remove(listener))
    try:
        known.append(listener)
        for graph in graphs():
            listener(graph)
    except BaseException:
        until.close()
        raise


def remove_function(function: int) -> None:
    """List the graphs of a function no more, and count their partitions no more: it was compiled again."""
    for graph in graphs():
        graph.is_replaced = graph.summary.function == function


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
    counts = dataclasses.asdict(registry.compiled)
    calls = [each for each in registry.counts if isinstance(each, CallStats)]
    for spec in dataclasses.fields(CallStats):
        counts[spec.name] = sum(getattr(stats, spec.name) for stats in calls)
    counts["graphs"] = len(registry.graphs)
    parts = [part for graph in graphs() for part in graph.summary.partitions]
    eager = [part for part in parts if not part.captured]
    counts |= {"partitions_captured": len(parts) - len(eager), "partitions_eager": len(eager)}
    counts["skips"] += sum(not all(each.is_chosen for each in part.reasons) for part in eager)
    return counts


def grown(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """Growth of each count; what was not there before was zero."""
    return {name: count - before.get(name, 0) for name, count in now.items()}


def graphs(since: int = 0) -> list[Graph]:
    """The graphs compiled in this process but for so many, oldest first."""
    return [graph for graph in registry.graphs[since:] if not graph.is_replaced]


def now() -> Moment:
    """Look at all counts."""
    parts = {
        (graph, name): (counts_of(part.stats), part.reasons.noted())
        for graph in graphs()
        for name, part in graph.parts.items()
    }
    calls = {graph: graph.tally.calls for graph in graphs()}
    others = {each: each.counted() for each in registry.counts if isinstance(each, StepCalls)}
    others |= {each: counts_of(each) for each in registry.counts if isinstance(each, ByHand)}
    return Moment(counters(), calls, parts, others)


def told(other: ByHand | StepCalls, calls: int) -> str:
    """Describe a training step, or what was graphed by hand, and how many of its calls a report is about."""
    since = f"\n  {calls} of these calls ran since this report or summary began"
    return other.explain() + since * (calls < other.calls)


def named(record: logging.LogRecord) -> bool:
    """Put our name before a warning of ours that Python prints as it is, since nobody set up logging."""
    if record.name.partition(".")[0] == "cgpass" and not record.getMessage().startswith("cgpass"):
        record.msg = f"cgpass: {record.msg}"
    return True
