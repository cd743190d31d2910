"""Tells static inputs of a graph, values in the pool, and those that are new in every call."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.facts.lines import user_line
from cgpass.compile.facts.partition_tag import get_tag

_AS_STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
"""Operators that count from the beginning of a storage."""

_READ_SEEDS = frozenset(
    {"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"}
)
"""Operators that read where dropout was drawn through a pointer."""


def input_infos(
    gm: fx.GraphModule,
    kinds: Mapping[str, InputKind] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[InputInfo, ...]:
    """Return one `InputInfo` a placeholder of `gm`, in order.

    `kinds` are those of tensors, by the placeholder's name; others are copied. `names` are what the user calls them.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    # Another placeholder that aliases a written one is none: each has a copy of its own, and only one has the new value.
    written = {_base(arg) for node in gm.graph.nodes for arg in values.mutated_inputs(node)}
    strided = _strided_placeholders(gm)
    seeds = seed_positions(gm)
    resized = _resized_placeholders(placeholders)
    return tuple(
        InputInfo(
            name=names.get(node.name, node.name),
            kind=_kind(node, kinds),
            line=next(filter(None, map(user_line, node.users)), None),
            mutated=node in written,
            is_seed=index in seeds,
            whole_storage=node in strided,
            is_resized=node in resized,
        )
        for index, node in enumerate(placeholders)
    )


def seed_positions(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that attention's backward reads as seed or offset. See Note [Seeds of attention]."""
    read = {
        values.argument(node, name)
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _READ_SEEDS
        for name in ("philox_seed", "philox_offset")
    }
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(placeholders) if node in read)


def _kind(node: fx.Node, kinds: Mapping[str, InputKind]) -> InputKind:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt) or type(value) is int:
        return InputKind.SYMINT
    is_tensor = isinstance(value, torch.Tensor)
    return kinds.get(node.name, InputKind.COPIED) if is_tensor else InputKind.OPAQUE


def _strided_placeholders(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The placeholders of which something reads or writes other places of their storage than their own elements."""
    found: list[fx.Node] = []
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _AS_STRIDED:
            found.append(node.args[0])
        elif any(name.endswith("_storage_offset") for name in node.kwargs):
            # Of `auto_functionalized_v2`
            bases = node.kwargs["_all_bases"]
            found += [base for base in bases if isinstance(base, fx.Node)]
    return frozenset(map(_base, found))


def _resized_placeholders(placeholders: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Return the tensors with symbols in their layouts that are no inputs themselves, as a jagged one's total length on 2.11."""
    numbers = [n.meta["val"] for n in placeholders if isinstance(n.meta.get("val"), torch.SymInt)]
    told = {number.node.expr for number in numbers}
    tensors = (node for node in placeholders if values.tensor_of(node) is not None)
    return frozenset(node for node in tensors if not told.issuperset(values.free_symbols(node)))


def _base(node: fx.Node) -> fx.Node:
    """Return the base of a node that is a view."""
    keys = values.storage_keys(node)
    while bases := [n for n in node.all_input_nodes if keys & values.storage_keys(n)]:
        node = bases[0]
    return node


def value_kinds(
    gm: fx.GraphModule, placeholder_kinds: Mapping[str, InputKind]
) -> dict[str, InputKind]:
    """Return the kind that each value of a graph with partition tags has as an input of a partition, by node name.

    A view lies where the value lies that it views, through any number of views. Tensor inputs that are not among
    `placeholder_kinds` are copied.
    """
    found: dict[str, InputKind] = {}
    for node in gm.graph.nodes:
        keys = values.storage_keys(node)
        bases = (arg for arg in node.all_input_nodes if keys & values.storage_keys(arg))
        base = next(bases, None)
        found[node.name] = _own_kind(node, placeholder_kinds) if base is None else found[base.name]
    return found


def _own_kind(node: fx.Node, placeholder_kinds: Mapping[str, InputKind]) -> InputKind:
    if node.op == "placeholder":
        return placeholder_kinds.get(node.name, InputKind.COPIED)
    if node.op == "get_attr":
        return InputKind.STATIC
    tag = get_tag(node)
    return InputKind.POOLED if tag is not None and tag.captured else InputKind.COPIED
