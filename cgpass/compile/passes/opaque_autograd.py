"""Hide custom operators whose autograd formula can't be traced.

AOTAutograd traces a custom operator's Python formula into the joint graph. A formula that reads data
on the host (`offsets.tolist()`) fails there and Dynamo breaks the graph, once per call. Hidden, the
operator and its formula are one node each, and run eagerly between captured partitions.
"""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from cgpass import torch_private
from cgpass.compile.passes.base import Pass, PassContext, PassResult
from cgpass.compile.passes.opaque_op import (
    NAMESPACE,
    FormulaContext,
    bind,
    hidden_op,
    is_supported,
    run_backward,
    run_setup,
)

log = logging.getLogger(__name__)

_UNKNOWN_SIZE = 2
"""What a size that depends on data is taken to be while a formula is tried."""


@dataclass(frozen=True)
class OpaqueAutograd(Pass):
    """Replace custom operators whose formula raises on fake tensors by operators that hide it.

    Works on Dynamo's graph and the graphs nested in it. Operators whose formula can be traced, that
    write to inputs, or that take or return lists of tensors are left alone.
    """

    name: ClassVar[str] = "opaque_autograd"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Rewrite `gm` in place."""
        del ctx
        modified = False
        for module in list(gm.modules()):
            if isinstance(module, fx.GraphModule):
                changed = [_hide(n) for n in module.graph.nodes if n.op == "call_function"]
                if any(changed):
                    module.recompile()
                    modified = True
        return PassResult(gm, modified)


def _hide(node: fx.Node) -> bool:
    op = _custom_op(node.target)
    if op is None or op.namespace == NAMESPACE or not is_supported(op):
        return False
    trial = _Trial.of(node, op)
    if trial is None:
        return False
    error = trial.run()
    if error is None:
        return False
    log.info("the autograd formula of %s can't be traced and is hidden: %r", op, error)
    node.target = hidden_op(op, trial.non_differentiable)
    return True


def _custom_op(target: object) -> torch._ops.OpOverload | None:
    """The custom operator with a Python formula that a node calls; Dynamo leaves packets in its graph."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    if isinstance(target, torch._ops.OpOverload) and torch_private.has_autograd_formula(target):
        return target
    return None


@dataclass
class _Trial:
    """Tries a node's formula on fake tensors of a mode of its own, so that no guard is left behind."""

    op: torch._ops.OpOverload
    inputs: tuple[Any, ...]
    keyword_only: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    mode: Any
    non_differentiable: tuple[int, ...] = ()
    """Outputs that the formula marked, known after `run`."""

    @classmethod
    def of(cls, node: fx.Node, op: torch._ops.OpOverload) -> "_Trial | None":
        """The trial of a node, None if not all its tensors are plain fake and strided."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _value)
        inputs, keyword_only = bind(op, args, kwargs)
        output = _value(node)
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        leaves = tree_leaves((inputs, outputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, fx.Node) for leaf in leaves) or not tensors:
            return None
        if not all(torch_private.is_plain_fake(t) and t.layout == torch.strided for t in tensors):
            return None
        mode = torch_private.sibling_fake_mode(tensors[0])
        return cls(op, inputs, keyword_only, outputs, mode)

    def run(self) -> Exception | None:
        """What the formula raised."""
        needs = _needs_grad(self.inputs)
        try:
            with torch_private.no_fake_mode(), self.mode, torch.no_grad():
                given = (self.inputs, self.keyword_only, self.outputs)
                inputs, keyword_only, outputs = tree_map(_copied, given)
                ctx = FormulaContext(needs)
                run_setup(self.op, ctx, inputs, keyword_only, outputs)
                marked = {id(tensor) for tensor in ctx.non_differentiable}
                self.non_differentiable = tuple(
                    i for i, output in enumerate(outputs) if id(output) in marked
                )
                run_backward(self.op, ctx, [torch.empty_like(out) for out in outputs], outputs)
        except Exception as error:  # whatever it is, AOTAutograd would meet it
            return error
        return None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val", node))


def _needs_grad(inputs: tuple[Any, ...]) -> list[bool]:
    """Which inputs need a gradient; where none does (inference), all that could."""
    tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
    needs = [tensor is not None and tensor.requires_grad for tensor in tensors]
    if any(needs):
        return needs
    return [t is not None and (t.is_floating_point() or t.is_complex()) for t in tensors]


def _copied(value: Any) -> Any:
    """A value with numbers for symbols, in the current fake mode if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            [_copied(size) for size in value.shape],
            [_copied(stride) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        number = value.node.hint
        return _UNKNOWN_SIZE if number is None else number
    return value
