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


@dataclass(frozen=True)
class OwnGradients(Pass):
    """Clone gradients that lie in an input's memory or in that of a gradient before them, the same one included."""

    name: ClassVar[str] = "own_gradients"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[()]:
        """Add clones to the end of `gm` if it is a backward graph."""
        if ctx.direction != "backward":
            return ()
        output, results = gm.graph.output_node(), []
        inputs = gm.graph.find_nodes(op="placeholder")
        taken = {key for node in inputs for key in values.storage_keys(node)}
        for node in values.graph_outputs(gm):
            keys = values.storage_keys(node) if _is_gradient(node) else frozenset[int]()
            results.append(node)
            if keys & taken:
                with gm.graph.inserting_before(output):
                    results[-1] = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
                inherit_meta(results[-1], node, node.meta["val"].clone())
            taken |= keys
        output.args = (tuple(results),)
        return ()


def _is_gradient(result: Any) -> bool:
    """Tell if something is added to `.grad`, and not what a subclass is made of besides: offsets of a jagged tensor."""
    value = values.tensor_of(result)
    return value is not None and (value.is_floating_point() or value.is_complex())
