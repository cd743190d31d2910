"""The mark that says which partition a node belongs to."""

from dataclasses import dataclass

from torch import fx

KEY = "cgpass"
"""Key of `node.meta`: the tag."""


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
