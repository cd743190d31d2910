"""What is kept for reports of the partitions of one graph."""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from cgpass.compile.facts.partition_tag import get_reason, get_tag
from cgpass.compile.facts.values import num_ops
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import PartitionSummary


def reasons_by_part(gm: fx.GraphModule) -> dict[str, list[Reason]]:
    """Return why each eager partition of a tagged graph is not captured, by the partition's name."""
    reasons: dict[str, list[Reason]] = {}
    for node in gm.graph.nodes:
        why = get_reason(node)
        if why is not None:
            reasons.setdefault(str(get_tag(node)), []).append(why)
    return reasons


def part_summaries(
    parts: Mapping[str, fx.GraphModule], reasons: Mapping[str, Sequence[Reason]]
) -> tuple[PartitionSummary, ...]:
    """Return a summary for each part."""
    return tuple(
        PartitionSummary(
            name,
            name.startswith("captured"),
            num_ops(gm),
            _lines(reasons.get(name, ())),
            skipped=not all(reason.is_chosen for reason in reasons.get(name, ())),
            why=tuple(reasons.get(name, ())),
        )
        for name, gm in parts.items()
    )


def _lines(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """One line for each reason, and one for all that is too small for the same reason."""
    chosen: dict[str, list[Reason]] = {}
    for reason in reasons:
        key = f"{reason.code} {reason.detail}" if reason.is_chosen else str(reason)
        chosen.setdefault(key, []).append(reason)
    return tuple(
        f"{first}{f' (and {len(more)} more)' if more and first.is_chosen else ''}"
        for first, *more in chosen.values()
    )
