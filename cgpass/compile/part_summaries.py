"""What is kept for reports of the partitions of one graph."""

from collections.abc import Mapping, Sequence

from torch import fx

from cgpass.compile.facts.partition_tag import get_reason, get_tag
from cgpass.compile.facts.values import num_ops
from cgpass.telemetry.reason import Reason
from cgpass.telemetry.summaries import PartitionSummary


def reasons_by_part(gm: fx.GraphModule) -> dict[str, list[Reason]]:
    """Why each eager partition is not captured, by the partition's name.

    Args:
        gm: With partition tags.
    """
    reasons: dict[str, list[Reason]] = {}
    for node in gm.graph.nodes:
        why = get_reason(node)
        if why is not None:
            reasons.setdefault(str(get_tag(node)), []).append(why)
    return reasons


def part_summaries(
    parts: Mapping[str, fx.GraphModule], reasons: Mapping[str, Sequence[Reason]]
) -> tuple[PartitionSummary, ...]:
    """A summary for each part.

    Args:
        parts: By name.
        reasons: See `reasons_by_part`.
    """
    return tuple(
        PartitionSummary(
            name, name.startswith("captured"), num_ops(gm), tuple(reasons.get(name, ()))
        )
        for name, gm in parts.items()
    )
