"""Where each value of a partitioned graph lies: with a static input, in the pool, or somewhere new every call."""

from collections.abc import Mapping

from torch import fx

from cgpass.graph.partition_tag import get_tag
from cgpass.graph.values import storage_keys
from cgpass.inputs import InputKind


class Origins:
    """Kinds of a graph's values as inputs of its partitions.

    A view lies where the value lies that it views, through any number of views: what matters is the node that
    allocated the storage.
    """

    def __init__(self, gm: fx.GraphModule, placeholder_kinds: Mapping[str, InputKind]) -> None:
        """Find every value's origin.

        Args:
            gm: A graph with partition tags.
            placeholder_kinds: Kinds of tensor inputs by placeholder name; those left out are copied ones.
        """
        self._by_storage: dict[int, InputKind] = {}
        self._by_name: dict[str, InputKind] = {}
        for node in gm.graph.nodes:
            keys = storage_keys(node)
            kind = next((self._by_storage[k] for k in keys if k in self._by_storage), None)
            if kind is None:
                kind = self._own_kind(node, placeholder_kinds)
            for key in keys:
                self._by_storage.setdefault(key, kind)
            self._by_name[node.name] = kind

    def _own_kind(self, node: fx.Node, placeholder_kinds: Mapping[str, InputKind]) -> InputKind:
        if node.op == "placeholder":
            return placeholder_kinds.get(node.name, InputKind.COPIED)
        if node.op == "get_attr":
            return InputKind.STATIC
        tag = get_tag(node)
        return InputKind.POOLED if tag is not None and tag.captured else InputKind.COPIED

    def kind_of(self, node: fx.Node) -> InputKind:
        """Kind of `node`'s value, for a node of this graph or a placeholder of one of its partitions."""
        for key in storage_keys(node):
            if key in self._by_storage:
                return self._by_storage[key]
        return self._by_name.get(node.name, InputKind.COPIED)

    def by_name(self) -> dict[str, InputKind]:
        """Kind of every node's value, by node name."""
        return dict(self._by_name)
