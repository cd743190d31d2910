"""The mark that says which partition a node belongs to."""

from dataclasses import dataclass

from torch import fx

from cgpass.telemetry.reason import Reason

KEY = "cgpass"
"""Key of `node.meta`: the tag."""
_REASON_KEY = "cgpass_reason"
"""Key of `node.meta`: why the node is eager."""


@dataclass(frozen=True)
class PartitionTag:
    """A node's partition. Placeholders, the output, `get_attr` nodes and host scalars have none: they are where they are used."""

    index: int
    """Position of the partition among all partitions of its graph, captured and eager alike."""
    captured: bool
    """True if a CUDA graph will hold the partition."""

    def __str__(self) -> str:
        return f"{'captured' if self.captured else 'eager'}_{self.index}"


def get_tag(node: fx.Node) -> PartitionTag | None:
    """The partition of `node`, None if it belongs to none."""
    return node.meta.get(KEY)


def set_tag(node: fx.Node, tag: PartitionTag, reason: Reason | None = None) -> None:
    """Put `node` into a partition, with the reason if it is eager."""
    node.meta.update({KEY: tag, _REASON_KEY: reason})


def get_reason(node: fx.Node) -> Reason | None:
    """Why `node` is eager, None if it is not or has its producer's reason."""
    return node.meta.get(_REASON_KEY)
