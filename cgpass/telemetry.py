"""Counters and summaries: what was captured, what was not, how often. No policy."""

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallStats:
    """Event counts of one captured partition. Plain integers: the hot path adds to them."""

    calls: int = 0
    """Calls of a captured partition."""
    warmups: int = 0
    """Calls that ran plainly to warm up."""
    recordings: int = 0
    """Recordings made, re-recordings included."""
    rerecordings: int = 0
    """Recordings made because a known input's address moved."""
    promotions: int = 0
    """Recordings that read inputs where they lie, since those never moved."""
    replays: int = 0
    """Replays, each recording's first one included."""
    plain_calls: int = 0
    """Calls after warm-up that ran without a graph: a limit, a failed capture, a foreign capture."""
    copied_bytes: int = 0
    """Bytes copied into placeholders, written back, and copied out of the pool."""
    rescues: int = 0
    """Times that held outputs of a recording were moved before a replay would have overwritten them."""
    rescued_bytes: int = 0
    """Bytes copied by rescues."""


@dataclass(slots=True)
class CompileStats:
    """Event counts of compilation."""

    joint_graphs: int = 0
    """Joint graphs split into forward and backward."""
    graphs: int = 0
    """Graphs compiled: forward, backward and inference graphs count one each."""
    partitions_captured: int = 0
    partitions_eager: int = 0
    skips: int = 0
    """Graphs or partitions that run without a CUDA graph although one was asked for."""


@dataclass(frozen=True)
class PartitionSummary:
    """One partition of a compiled graph, for reports."""

    name: str
    captured: bool
    num_ops: int
    reasons: tuple[str, ...] = ()
    """Why it is not captured, one line a node."""


@dataclass(frozen=True)
class GraphSummary:
    """One compiled graph, for reports."""

    direction: str
    """"forward", "backward" or "inference"."""
    partitions: tuple[PartitionSummary, ...]
    skip: str | None = None
    """Why the whole graph runs plainly, if it does."""

    def __str__(self) -> str:
        captured = [p for p in self.partitions if p.captured]
        eager = [p for p in self.partitions if not p.captured]
        head = (
            f"{self.direction}: {len(captured)} captured ({sum(p.num_ops for p in captured)} ops), "
            f"{len(eager)} eager ({sum(p.num_ops for p in eager)} ops)"
        )
        if self.skip is not None:
            head += f"; runs plainly: {self.skip}"
        return "\n".join([head, *(f"  {p.name}: {reason}" for p in eager for reason in p.reasons)])


@dataclass
class _Registry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    compiled: CompileStats = field(default_factory=CompileStats)
    calls: list[CallStats] = field(default_factory=list)
    graphs: list[GraphSummary] = field(default_factory=list)


_registry = _Registry()

compile_stats = _registry.compiled


def new_call_stats() -> CallStats:
    """Counts for one more captured partition; they stay in the totals after the partition is gone."""
    stats = CallStats()
    with _registry.lock:
        _registry.calls.append(stats)
    return stats


def add_graph(summary: GraphSummary) -> int:
    """Register a compiled graph.

    Returns:
        Its number, for `replace_partition`.
    """
    with _registry.lock:
        _registry.graphs.append(summary)
        _registry.compiled.graphs += 1
        _count(summary.partitions, 1)
        return len(_registry.graphs) - 1


def replace_partition(graph: int, name: str, parts: Sequence[PartitionSummary]) -> None:
    """Note that a partition turned out to be others.

    Args:
        graph: Number of the compiled graph.
        name: Of the partition.
        parts: What it is now.
    """
    with _registry.lock:
        summary = _registry.graphs[graph]
        old = [p for p in summary.partitions if p.name == name]
        partitions = [q for p in summary.partitions for q in (parts if p.name == name else (p,))]
        _registry.graphs[graph] = dataclasses.replace(summary, partitions=tuple(partitions))
        _count(old, -1)
        _count(parts, 1)


def _count(parts: Sequence[PartitionSummary], sign: int) -> None:
    _registry.compiled.partitions_captured += sign * sum(p.captured for p in parts)
    _registry.compiled.partitions_eager += sign * sum(not p.captured for p in parts)


def counters() -> dict[str, int]:
    """Totals of this process since it began; take differences to count a stretch of calls."""
    with _registry.lock:
        totals = dataclasses.asdict(_registry.compiled)
        for name in (f.name for f in dataclasses.fields(CallStats)):
            totals[name] = sum(getattr(stats, name) for stats in _registry.calls)
    return totals


def summary() -> str:
    """Every graph compiled in this process: partitions captured and eager, and why."""
    with _registry.lock:
        return "\n".join(str(graph) for graph in _registry.graphs) or "no graph was compiled"


def graphs() -> tuple[GraphSummary, ...]:
    """Every graph compiled in this process, oldest first."""
    with _registry.lock:
        return tuple(_registry.graphs)
