"""Which nodes of a graph have quantised values.

The fake tensor that stands for a quantised one does not say so: it is a plain tensor, of the type that was quantised.
So a value is told by what made it. Source: torch/_subclasses/fake_tensor.py and meta kernels, 2.11 to 2.15.
"""

import functools

import torch
from torch import fx

from cgpass.compile.facts import op_tables, values


def quantised_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose values are quantised or lie in a quantised one: what quantises, and what follows from it."""
    found = {
        node: None
        for target in _quantising_overloads()
        for node in graph.find_nodes(op="call_function", target=target)
    }
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.op == "call_function" and _may_be_quantised(user):
                found[user] = None
                waiting.append(user)
    return frozenset(found)


def _may_be_quantised(node: fx.Node) -> bool:
    """Whether a node that reads a quantised value may have one, too."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.name.removeprefix("aten::") in op_tables.DEQUANTISING:
            return False
    return any(tensor.is_floating_point() for tensor in values.tensors(node))


@functools.cache
def _quantising_overloads() -> tuple[torch._ops.OpOverload, ...]:
    packets = [getattr(torch.ops.aten, name) for name in sorted(op_tables.QUANTISING)]
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads())
