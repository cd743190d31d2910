"""How often partitions ran after their warm-ups, and how often of that in graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

from cgpass import telemetry
from cgpass.telemetry.summaries import GraphSummary

_MANY = 0.2
"""Share of calls from which on warm-ups are worth a word."""
_FEW = 4
"""Warm-ups without a recording after them that any partition may have."""


@dataclass(frozen=True)
class Ran:
    """Calls of one partition."""

    calls: int
    """But for warm-ups."""
    replays: int
    """Those among them that a graph made."""
    warmups: int = 0
    """Warm-ups, which count as neither; some count as calls, see `excused`."""


def calls_of_parts(summary: GraphSummary, runs: Sequence[telemetry.GraphRun]) -> dict[str, Ran]:
    """Calls of each partition of a graph, by name.

    Args:
        summary: Of the graph.
        runs: What runs it.
    """
    parts = {name: part for run in runs for name, part in run.parts.items()}
    warmups = max(map(excused, parts.values()), default=0)
    made = sum(run.tally.calls for run in runs)
    found = {}
    for part in summary.partitions:
        known = parts.get(part.name) if part.captured else None
        if known is not None:
            stats, free = known.stats, excused(known)
            found[part.name] = Ran(stats.calls - free, stats.replays, free)
        else:
            found[part.name] = Ran(max(0, made - warmups), 0)
    return found


def excused(part: telemetry.PartitionRun) -> int:
    """Warm-ups that do not count: all, unless calls go on warming up what is never recorded."""
    stats = part.stats
    needed = stats.recordings
    idle = stats.warmups - needed
    return needed if idle > _FEW and idle > _MANY * stats.calls else stats.warmups
