"""Give each gradient memory of its own.

Note [Gradients of several leaves]
    Autograd keeps what a backward returns as `.grad` and adds the next one in place. AOTAutograd's backward may return
    gradients of two leaves as views of one tensor, or a view of what came in or was saved: the sum of one is then
    written into the other too, and of each microbatch once more. Eager autograd has no such views, since each gradient
    is handed on by its own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cgpass.compile.facts import values
from cgpass.compile.passes.base import Pass, PassContext, inherit_meta
from cgpass.errors import PostconditionError


@dataclass(frozen=True)
class OwnGradients(Pass):
    """Clone gradients that lie in an input's memory or in that of a gradient before them, the same one included."""

    name: ClassVar[str] = "own_gradients"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[()]:
        """Add clones to the end of `gm` if it is a backward graph."""
        output, results = gm.graph.output_node(), list(values.graph_outputs(gm))
        for position in _shared(gm, ctx):
            node = results[position]
            with gm.graph.inserting_before(output):
                clone = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            inherit_meta(clone, node, node.meta["val"].clone())
            results[position] = clone
        output.args = (tuple(results),)
        return ()

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """No gradient shares memory with what comes in or with another one."""
        if left := _shared(gm, ctx):
            raise PostconditionError(f"gradients share memory: {', '.join(map(str, left))}")


def _shared(gm: fx.GraphModule, ctx: PassContext) -> list[int]:
    """Positions of a backward's gradients that share memory with what comes in or with one before them."""
    if ctx.direction != "backward":
        return []
    taken: set[int] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        taken |= values.storage_keys(node)
    found = []
    for position, node in enumerate(values.graph_outputs(gm)):
        if _is_gradient(node):
            keys = values.storage_keys(node)
            if keys & taken:
                found.append(position)
            taken |= keys
    return found


def _is_gradient(result: Any) -> bool:
    """Tell if something is added to `.grad`, and not what a subclass is made of besides: offsets of a jagged tensor."""
    value = result.meta.get("val") if isinstance(result, fx.Node) else None
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
