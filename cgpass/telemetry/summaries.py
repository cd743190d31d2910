"""Summaries of compiled graphs, partitions and recordings for reports: texts and numbers, nothing of the user's."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cgpass.telemetry.reason import Reason, many


@dataclass(frozen=True)
class Source:
    """The origin of what is compiled, for messages and traces."""

    place: str | None = None
    """The line where the function begins, `model.py:41 in forward`."""
    trace_id: Any = None
    """The id under which torch's trace lists its compilation."""
    code: tuple[str, int, str] | None = None
    """File, first line and name of the function."""
    callers: tuple[tuple[str, int, str], ...] = ()
    """The same of functions with graph breaks whose call had it compiled."""

    def of(self, name: str) -> str:
        """`name`, with where it is from if that is known."""
        return name if self.place is None else f"{name} of {self.place}"


@dataclass(frozen=True)
class PartitionSummary:
    """One partition of a compiled graph."""

    name: str
    captured: bool
    num_ops: int
    """Operators of its graph, before any are fused."""
    reasons: tuple[Reason, ...] = ()
    """Reasons for not capturing it, one for each operator to blame."""


@dataclass(frozen=True)
class GraphSummary:
    """One compiled graph."""

    direction: str
    """"forward", "backward" or "inference"."""
    partitions: tuple[PartitionSummary, ...]
    skip: str | None = None
    """The reason that the whole graph runs without CUDA graphs, if it does."""
    num_ops: int = 0
    """Operators of such a graph."""
    place: str | None = None
    """The line where its function begins, `model.py:41 in forward`."""
    why: tuple[Reason, ...] = ()
    """The reasons for `skip`, one for each operator to blame."""
    code: tuple[str, int, str] | None = None
    """File, first line and name of the function."""
    callers: tuple[tuple[str, int, str], ...] = ()
    """See `Source`."""
    function: int | None = None
    """The compiled function that it belongs to, as `telemetry.new_function` numbers them."""
    graph_break: Reason | None = None
    """Dynamo's reason to end the function there, if it goes on in another one."""
    driver: str | None = None
    """The driver that records it, "cuda" or "simulated", if any does."""

    @property
    def name(self) -> str:
        """Its direction, and where its function begins."""
        return self.direction if self.place is None else f"{self.direction} of {self.place}"

    def __str__(self) -> str:
        if self.skip is not None:
            count = many(self.num_ops, "operator")
            return f"{self.name}: runs without CUDA graphs ({count}): {self.skip}"
        captured, eager = (
            [p for p in self.partitions if p.captured is kind] for kind in (True, False)
        )
        ops = [many(sum(p.num_ops for p in parts), "operator") for parts in (captured, eager)]
        head = f"{self.name}: {many(len(captured), 'partition')} captured ({ops[0]}), {len(eager)} eager ({ops[1]})"
        why = [f"  {p.name}: {reason}" for p in self.partitions for reason in counted(p.reasons)]
        return "\n".join([head, *why])


def counted(found: Iterable[Reason]) -> tuple[Reason, ...]:
    """Each reason once, with how often it was found; those that nobody can help come last, whatever the operators."""
    first: dict[object, Reason] = {}
    for reason in found:
        key = (reason.code, reason.detail) if reason.is_chosen else replace(reason, count=1)
        had = first.setdefault(key, replace(reason, count=0))
        ops = ", ".join(dict.fromkeys(f"{had.op}, {reason.op}".split(", ")))
        line = had.line if had.line == reason.line else None
        first[key] = replace(had, op=ops, line=line, count=had.count + reason.count)
    return tuple(sorted(first.values(), key=lambda each: each.is_chosen))


@dataclass(frozen=True)
class RecordingNote:
    """Cause and cost of one recording."""

    cause: str
    """A code: "first", "shape", "moved", "other tensors", "memory", "held", "anew"."""
    detail: str
    """The same as a sentence, with names, addresses and lines."""
    copied_bytes: int
    """Bytes that each replay copies."""
    record_ms: float | None
    """Host time of capturing and instantiating it; None in reports of simulated graphs."""
    line: str | None = None
    """The user's line that reads, or returned, what was new."""
