"""Where each value of a partitioned graph lies: with a static input, in the pool, or somewhere new every call."""

from collections.abc import Collection, Mapping

from torch import fx

from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.facts.values import storage_keys


class Origins:
    """Kinds of a graph's values as inputs of its partitions; a view lies where the value lies that it views."""

    def __init__(
        self,
        gm: fx.GraphModule,
        placeholder_kinds: Mapping[str, InputKind],
        copies: Collection[str] = (),
    ) -> None:
        """Find every value's origin in a graph with partition tags, from the kinds of its tensor inputs (else copied).

        `copies` are placeholders that are copied before the partitions get them, whatever they shared memory with when the
        graph was traced.
        """
        self._by_storage: dict[int, InputKind] = {}
        self._by_name: dict[str, InputKind] = {}
        self._in_copies: set[str] = set()
        """Names of the copies, and of what views them."""
        for node in gm.graph.nodes:
            keys = storage_keys(node)
            if node.name in copies or self._views_copy(node, keys):
                self._in_copies.add(node.name)
                self._by_name[node.name] = InputKind.COPIED
                continue
            kind = next((self._by_storage[k] for k in keys if k in self._by_storage), None)
            if kind is None:
                kind = self._own_kind(node, placeholder_kinds)
            for key in keys:
                self._by_storage.setdefault(key, kind)
            self._by_name[node.name] = kind

    def _views_copy(self, node: fx.Node, keys: frozenset[int]) -> bool:
        return bool(self._in_copies) and any(
            arg.name in self._in_copies and not keys.isdisjoint(storage_keys(arg))
            for arg in node.all_input_nodes
        )

    def _own_kind(self, node: fx.Node, placeholder_kinds: Mapping[str, InputKind]) -> InputKind:
        if node.op == "placeholder":
            return placeholder_kinds.get(node.name, InputKind.COPIED)
        if node.op == "get_attr":
            return InputKind.STATIC
        tag = get_tag(node)
        return InputKind.POOLED if tag is not None and tag.captured else InputKind.COPIED

    def kind_of(self, node: fx.Node) -> InputKind:
        """Kind of `node`'s value, for a node of this graph or a placeholder of one of its partitions."""
        if node.name in self._in_copies:
            return InputKind.COPIED
        for key in storage_keys(node):
            if key in self._by_storage:
                return self._by_storage[key]
        return self._by_name.get(node.name, InputKind.COPIED)

    def by_name(self) -> dict[str, InputKind]:
        """Kind of every node's value, by node name."""
        return dict(self._by_name)
