"""Reports on some calls, as plain data."""

from dataclasses import dataclass, field

from cgpass.telemetry.reason import Reason, at_work
from cgpass.telemetry.summaries import GraphSummary, PartitionSummary, RecordingNote


@dataclass(frozen=True, kw_only=True)
class CopiedInput:
    """An input that the last replay copied."""

    name: str
    num_bytes: int
    """In that replay, back again included where the partition writes it."""
    line: str | None = None
    """The user's line that first reads it."""
    moved: bool = False
    """True if it is a parameter or a buffer, which is copied where it lies at a place that is new."""


@dataclass(frozen=True, kw_only=True)
class PartitionReport(PartitionSummary):
    """One partition of a graph, and what it did."""

    calls: int = 0
    """But for warm-ups, and those that raised."""
    counts: dict[str, int] = field(default_factory=dict)
    """The growth of its `cgpass.counters()`."""
    recordings: tuple[RecordingNote, ...] = ()
    """The newest of those that were made, oldest first."""
    copied_inputs: tuple[CopiedInput, ...] = ()
    """Of its last replay, largest first."""
    static_inputs: int = 0
    """Parameters, buffers and marked inputs, read where they lie, but for those of `copied_inputs` that moved."""
    returned_at: str | None = None
    """The user's line that makes all of its results, if it is one."""
    output_bytes: int | None = None
    """Memory of its recordings' outputs."""
    device_ms: float | None = None
    """Mean time of a call on the device; None where none was timed."""

    @property
    def replays(self) -> int:
        """Calls that a CUDA graph made."""
        return self.counts.get("replays", 0)


@dataclass(frozen=True, kw_only=True)
class GraphReport(GraphSummary):
    """A forward, backward or inference graph, and what it did."""

    partitions: tuple[PartitionReport, ...]
    calls: int = 0

    @property
    def work(self) -> tuple[int, int]:
        """Operators that CUDA graphs ran, and all that ran, but for warm-ups and what launches nothing."""
        if self.skip is not None:
            return 0, self.calls * at_work(self.num_ops, self.why)
        done = sum(part.replays * part.num_ops for part in self.partitions)
        every = ((p, () if p.captured else p.reasons) for p in self.partitions)
        return done, sum(part.calls * at_work(part.num_ops, why) for part, why in every)


@dataclass(kw_only=True)
class Facts:
    """The facts of some calls."""

    cgpass: str = ""
    torch: str = ""
    device: str = ""
    made: str = ""
    """Date and time; empty while the block goes on, and nothing is told yet."""
    command: str = ""
    """Of the process."""
    model: str = ""
    """The place where the first function begins."""
    graphs: tuple[GraphReport, ...] = ()
    """Those that ran."""
    left_to_eager: tuple[Reason, ...] = ()
    """Functions and rests of functions (`rest`) that `torch.compile` gave up; nothing of them is in `graphs`."""
    graph_breaks: tuple[Reason, ...] = ()
    """Others that were met, each once."""
    recompilations: tuple[Reason, ...] = ()
    """Reasons for compiling functions once more meanwhile."""
    others: tuple[str, ...] = ()
    """Whole training steps and callables graphed by hand that ran, a few lines each."""
    whole_steps: int = 0
    """Calls of training steps that were one graph."""
    steps: int = 0
    """Calls of training steps, but for first ones and warm-ups."""
    counters: dict[str, int] = field(default_factory=dict)
    """The growth of `cgpass.counters()`."""
    native: str | None = None
    """Says if the C++ of calls is in use, and if not why; None if nothing was to be recorded."""
    pool_bytes: int | None = None
    """Memory that the graphs' pools take from the device; None where no device is asked for any."""
    graphs_ms: float | None = None
    """Time on the device inside CUDA graphs, in the sample of calls that was timed."""
    device_ms: float | None = None
    """All of the time on the device in that sample, idle time and work between the calls included."""
    ms: float | None = None
    """Mean time of a call with CUDA graphs, until the device is done, if they were compared."""
    plain_ms: float | None = None
    """The same without."""

    @property
    def partitions(self) -> tuple[PartitionReport, ...]:
        """Those of all graphs."""
        return tuple(part for graph in self.graphs for part in graph.partitions)

    @property
    def work(self) -> tuple[int, int]:
        """Operators that CUDA graphs ran, and all that compiled functions ran, but for warm-ups."""
        works = [graph.work for graph in self.graphs]
        return sum(done for done, _ in works), sum(work for _, work in works)

    @property
    def boundaries(self) -> int:
        """Places where graphs end though work goes on: partitions without a graph, breaks, what is left to eager."""
        mixed = [g.partitions for g in self.graphs if any(p.captured for p in g.partitions)]
        eager = sum(not part.captured for parts in mixed for part in parts)
        return eager + len(self.graph_breaks) + len(self.left_to_eager)

    @property
    def plain_calls(self) -> int:
        """Calls of captured partitions that ran without a graph; warm-ups are none."""
        return self.counters.get("plain_calls", 0)
