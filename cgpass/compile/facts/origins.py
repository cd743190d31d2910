"""Where each value of a partitioned graph lies: with a static input, in the pool, or somewhere new every call."""

from collections.abc import Collection, Mapping

from torch import fx

from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.facts.values import storage_keys


def value_kinds(
    gm: fx.GraphModule,
    placeholder_kinds: Mapping[str, InputKind],
    copies: Collection[str] = (),
) -> dict[str, InputKind]:
    """Return the kind that each value of a graph with partition tags has as an input of a partition, by node name.

    A view lies where the value lies that it views, through any number of views. Tensor inputs that are not among
    `placeholder_kinds` are copied; `copies` are copied before the partitions get them, whatever they shared memory with
    when the graph was traced.
    """
    by_storage: dict[int, InputKind] = {}
    found: dict[str, InputKind] = {}
    in_copies: set[str] = set()  # the copies, and what views them
    for node in gm.graph.nodes:
        keys = storage_keys(node)
        if node.name in copies or any(
            arg.name in in_copies and not keys.isdisjoint(storage_keys(arg))
            for arg in (node.all_input_nodes if in_copies else ())
        ):
            in_copies.add(node.name)
            found[node.name] = InputKind.COPIED
            continue
        kind = next((by_storage[key] for key in keys if key in by_storage), None)
        if kind is None:
            kind = _own_kind(node, placeholder_kinds)
        for key in keys:
            by_storage.setdefault(key, kind)
        found[node.name] = kind
    return found


def _own_kind(node: fx.Node, placeholder_kinds: Mapping[str, InputKind]) -> InputKind:
    if node.op == "placeholder":
        return placeholder_kinds.get(node.name, InputKind.COPIED)
    if node.op == "get_attr":
        return InputKind.STATIC
    tag = get_tag(node)
    return InputKind.POOLED if tag is not None and tag.captured else InputKind.COPIED
