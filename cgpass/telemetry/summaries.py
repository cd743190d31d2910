"""What is kept of compiled graphs, partitions and recordings for reports: texts and numbers, nothing of the user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cgpass.telemetry.reason import Reason, many

RECORDINGS_KEPT: Final = 64
"""Recordings of a partition of which it is known why they were made."""


@dataclass(frozen=True)
class PartitionSummary:
    """One partition of a compiled graph, for reports."""

    name: str
    captured: bool
    num_ops: int
    reasons: tuple[str, ...] = ()
    """Why it is not captured, one line a node."""
    skipped: bool = False
    """Whether something in it can't be captured."""
    why: tuple[Reason, ...] = ()
    """Why it is not captured, one for each operator to blame."""


@dataclass(frozen=True)
class GraphSummary:
    """One compiled graph, for reports."""

    direction: str
    """"forward", "backward" or "inference"."""
    partitions: tuple[PartitionSummary, ...]
    skip: str | None = None
    """Why the whole graph runs plainly, if it does."""
    num_ops: int = 0
    """Operators of a graph that runs plainly."""
    place: str | None = None
    """Where the function that it belongs to begins, `model.py:41 in forward`."""
    why: tuple[Reason, ...] = ()
    """Why the whole graph runs plainly, one for each operator to blame."""
    function: int | None = None
    """The compiled function that it belongs to, as `telemetry.new_function` numbers them."""
    graph_break: Reason | None = None
    """Why Dynamo ended the function there, if it goes on in another one."""
    driver: str | None = None
    """What records it, "cuda" or "simulated", if anything does."""

    def __str__(self) -> str:
        head = self.direction if self.place is None else f"{self.direction} of {self.place}"
        if self.skip is not None:
            return (
                f"{head}: runs without CUDA graphs ({many(self.num_ops, 'operator')}): {self.skip}"
            )
        captured = [p for p in self.partitions if p.captured]
        eager = [p for p in self.partitions if not p.captured]
        head += (
            f": {many(len(captured), 'partition')} captured ({_operators(captured)}), "
            f"{len(eager)} eager ({_operators(eager)})"
        )
        return "\n".join([head, *(f"  {p.name}: {reason}" for p in eager for reason in p.reasons)])


def _operators(parts: Sequence[PartitionSummary]) -> str:
    return many(sum(part.num_ops for part in parts), "operator")


@dataclass(frozen=True)
class RecordingNote:
    """Why and how one recording was made."""

    cause: str
    """What was new: "first", "shape", "moved", "other tensors", "memory", "held", "input", "anew"."""
    detail: str
    """The same as a sentence, with names, addresses and lines."""
    copied_bytes: int
    """Bytes that each replay copies."""
    pool: int
    """Which of the function's pools it lies in."""
    record_ms: float
    """Host time of capturing and instantiating it."""
    instantiate_ms: float | None = None
    """Host time of ending the capture, in which the graph is instantiated; None if no device does that."""
    warm_up_ms: float | None = None
    """Host time of the last warm-up call before it, None if there was none."""
