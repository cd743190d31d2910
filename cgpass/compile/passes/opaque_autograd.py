"""Hide custom operators whose autograd formula can't be traced.

AOTAutograd traces a custom operator's Python formula into the joint graph. A formula that reads data
on the host (`offsets.tolist()`) fails there and Dynamo breaks the graph, once per call. Hidden, the
operator and its formula are one node each, and run eagerly between captured partitions.

For the user's `lib::op` there are `cgpass::lib__op`, which calls it, and `cgpass::lib__op_backward`,
which runs its formula on real tensors. Both are looked up by name at every call, so that an operator
that is registered again is followed.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from cgpass import torch_private
from cgpass.compile.facts.ancestry import register_stand_in
from cgpass.compile.passes.base import Pass, PassContext, PassResult

log = logging.getLogger(__name__)

_UNKNOWN_SIZE = 2
"""What a size that depends on data is taken to be while a formula is tried."""

NAMESPACE = "cgpass"


@dataclass(frozen=True)
class OpaqueAutograd(Pass):
    """Replace custom operators whose formula raises on fake tensors by operators that hide it.

    Works on Dynamo's graph and the graphs nested in it. Operators whose formula can be traced, that
    write to inputs, that take or return lists of tensors, that have keyword-only arguments, or whose
    formula marks outputs as non-differentiable are left alone.
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
    error = _try_formula(node, op)
    if error is None:
        return False
    log.info("the autograd formula of %s can't be traced and is hidden: %r", op, error)
    node.target = hidden_op(op)
    return True


def _custom_op(target: object) -> torch._ops.OpOverload | None:
    """The custom operator with a Python formula that a node calls; Dynamo leaves packets in its graph."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    is_operator = isinstance(target, torch._ops.OpOverload)
    return target if is_operator and torch_private.autograd_formula(target) else None


def _try_formula(node: fx.Node, op: torch._ops.OpOverload) -> Exception | None:
    """Return what a node's formula raises on fake tensors of a mode of its own, so that no guard is left behind.

    None, too, for calls that are not of plain, strided tensors.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _value)
    output = _value(node)
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    given = (bind(op, args, kwargs), outputs)
    leaves = tree_leaves(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(isinstance(leaf, fx.Node) for leaf in leaves) or not tensors:
        return None
    if not all(torch_private.is_plain_fake(t) and t.layout == torch.strided for t in tensors):
        return None
    ctx = FormulaContext(_needs_grad(given[0]))
    mode = torch_private.sibling_fake_mode(tensors[0])
    try:
        with torch_private.no_fake_mode(), mode, torch.no_grad():
            inputs, outputs = tree_map(_copied, given)
            run_formula(op, ctx, inputs, outputs, [torch.empty_like(out) for out in outputs])
    except Exception as error:  # whatever it is, AOTAutograd would meet it
        return None if ctx.marks_outputs else error
    return None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val", node))


def _needs_grad(inputs: tuple[Any, ...]) -> list[bool]:
    """Return which inputs need a gradient; where none does (inference), all that could."""
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


class FormulaContext:
    """Autograd's context object for a formula that runs on its own; it may set any attribute and finds it again."""

    def __init__(self, needs_input_grad: Iterable[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.materialize_grads = True
        self.marks_outputs = False
        """True if some have no gradient."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep `tensors` as `saved_tensors`."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose between zeros and None for missing gradients."""
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Say which outputs have no gradient."""
        self.marks_outputs = bool(tensors)


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call by position, with what it left to the defaults."""
    left = op._schema.arguments[len(args) :]
    return (*args, *(kwargs.get(argument.name, argument.default_value) for argument in left))


def run_formula(
    op: torch._ops.OpOverload,
    ctx: FormulaContext,
    inputs: tuple[Any, ...],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """Run an operator's formula as `torch.library` would; the gradients may alias inputs and each other."""
    formula = torch_private.autograd_formula(op)
    assert formula is not None
    setup, backward = formula
    if setup is not None:
        output = outputs[0] if len(op._schema.returns) == 1 else tuple(outputs)
        setup(ctx=ctx, inputs=inputs, output=output)
    if ctx.materialize_grads:
        pairs = zip(grads, outputs, strict=True)
        grads = [torch.zeros_like(out) if grad is None else grad for grad, out in pairs]
    result = backward(ctx, *grads)
    return result if isinstance(result, tuple) else (result,)


def is_supported(op: torch._ops.OpOverload) -> bool:
    """Tell if an operator can be hidden: plain tensors by position, nothing written to, no effects, no autocast."""
    schema = op._schema
    if any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        return False
    if not schema.returns or any(str(item.type) != "Tensor" for item in schema.returns):
        return False
    plain = ("Tensor", "Optional[Tensor]")
    if any("Tensor" in str(a.type) and str(a.type) not in plain for a in schema.arguments):
        return False
    if any(argument.kwarg_only for argument in schema.arguments):
        return False
    return not (torch_private.has_autocast_kernel(op) or torch_private.has_effect(op))


def hidden_op(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator that stands in for `op`; made once."""
    return _define(op._schema.name, str(op._schema))._opoverload


@functools.cache
def _define(qualname: str, schema: str) -> Any:
    op = torch_private.custom_op(qualname)
    _, _, signature = schema.partition("(")
    name = f"{NAMESPACE}::{qualname.replace('::', '__')}"
    backward_op = _define_backward(f"{name}_backward", qualname, signature)
    tags = {*op.tags, torch.Tag.cudagraph_unsafe} - {torch.Tag.pt2_compliant_tag}

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return torch_private.custom_op(qualname)(*args, **kwargs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        pairs = list(zip(inputs, is_tensor, strict=True))
        ctx.save_for_backward(*(value if yes else None for value, yes in pairs), *outputs)
        ctx.others = [None if yes else value for value, yes in pairs]

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(ctx.others)
        pairs = zip(saved[:count], ctx.others, strict=True)
        inputs = [other if tensor is None else tensor for tensor, other in pairs]
        # the dispatcher drops trailing arguments that equal their defaults, and their flags
        needs = [*ctx.needs_input_grad, *[False] * (count - len(ctx.needs_input_grad))]
        found = iter(backward_op(list(saved[count:]), list(grads), needs, *inputs))
        return tuple(next(found) if need else None for need in needs)

    made = torch.library.custom_op(
        name, call, mutates_args=(), schema=f"({signature}", tags=tuple(sorted(tags, key=str))
    )
    made.register_fake(call)
    made.register_autograd(backward, setup_context=setup_context)
    register_stand_in(made._opoverload, str(op))
    return made


def _define_backward(name: str, qualname: str, signature: str) -> Any:
    """Make the operator that runs a formula: a gradient for each input that needs one, zeros where the formula returns None.

    Gradients have the strides of `torch.empty_like(input)`, and alias neither inputs nor each other.
    """

    def call(
        outputs: list[torch.Tensor],
        grads: list[torch.Tensor | None],
        needs: list[bool],
        *args: Any,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        op = torch_private.custom_op(qualname)
        inputs = bind(op, args, kwargs)
        ctx = FormulaContext(needs)
        with torch_private.autograd_keys_on(), torch.no_grad():
            found = run_formula(op, ctx, inputs, outputs, grads)
            leaves = [*outputs, *grads, *inputs]
            taken = {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
            chosen = zip(inputs, found, needs, strict=True)
            return [_own(grad, value, taken) for value, grad, need in chosen if need]

    def fake(
        outputs: list[torch.Tensor],
        grads: list[torch.Tensor | None],
        needs: list[bool],
        *args: Any,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        del outputs, grads
        inputs = bind(torch_private.custom_op(qualname), args, kwargs)
        pairs = zip(inputs, needs, strict=True)
        return [torch.empty_like(value, requires_grad=False) for value, need in pairs if need]

    arguments, _, _ = signature.rpartition(") -> ")
    ours = "Tensor[] cgpass_outputs, Tensor?[] cgpass_grads, bool[] cgpass_needs"
    made = torch.library.custom_op(
        name,
        call,
        mutates_args=(),
        schema=f"({ours}, {arguments}) -> Tensor[]",
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    made.register_fake(fake)
    register_stand_in(made._opoverload, f"backward of {torch_private.custom_op(qualname)}")
    return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _own(grad: torch.Tensor | None, value: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient of `value` laid out as its fake, in memory that is not among the `taken` storages."""
    if grad is None:
        return torch.zeros_like(value)
    if grad.shape != value.shape:
        grad = grad.sum_to_size(value.shape)
    plain = torch.empty_like(value, requires_grad=False)
    fits = grad.dtype == value.dtype and grad.stride() == plain.stride()
    if not fits or _storage(grad) in taken:
        grad = plain.copy_(grad)
    taken.add(_storage(grad))
    return grad
