"""Operators that hide a custom operator and its autograd formula from tracing.

For the user's `lib::op` there are `cgpass::lib__op`, which calls it, and `cgpass::lib__op_backward`,
which runs its formula on real tensors. AOTAutograd sees one node for each. Both are looked up by
name at every call, so that an operator that is registered again is followed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.compile.facts import stand_ins

NAMESPACE = "cgpass"


class FormulaContext:
    """What stands for autograd's context object while a formula runs on its own.

    A formula may set any attribute and finds it again, as on autograd's.
    """

    def __init__(self, needs_input_grad: Iterable[bool]) -> None:
        """Args: needs_input_grad: one per positional input."""
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.materialize_grads = True
        self.non_differentiable: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep `tensors` as `saved_tensors`."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Whether missing gradients come as zeros or as None."""
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Say which outputs have no gradient."""
        self.non_differentiable = tensors


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Positional and keyword-only arguments of a call, with what it left to the defaults."""
    positional: list[Any] = []
    keyword_only: dict[str, Any] = {}
    for index, argument in enumerate(op._schema.arguments):
        if argument.kwarg_only:
            keyword_only[argument.name] = kwargs.get(argument.name, argument.default_value)
        elif index < len(args):
            positional.append(args[index])
        else:
            positional.append(kwargs.get(argument.name, argument.default_value))
    return tuple(positional), keyword_only


def run_setup(
    op: torch._ops.OpOverload,
    ctx: FormulaContext,
    inputs: tuple[Any, ...],
    keyword_only: dict[str, Any],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Run the `setup_context` of an operator's formula as `torch.library` would."""
    setup, _ = torch_private.autograd_formula(op)
    if setup is not None:
        output = outputs[0] if len(op._schema.returns) == 1 else tuple(outputs)
        more = {"keyword_only_inputs": keyword_only} if keyword_only else {}
        setup(ctx=ctx, inputs=inputs, output=output, **more)


def run_backward(
    op: torch._ops.OpOverload,
    ctx: FormulaContext,
    grads: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Run an operator's formula with `ctx` as its setup left it.

    Returns:
        What the formula returned, as a tuple. **Lifetime:** may alias inputs and each other.
    """
    _, backward = torch_private.autograd_formula(op)
    if ctx.materialize_grads:
        pairs = zip(grads, outputs, strict=True)
        grads = [torch.zeros_like(out) if grad is None else grad for grad, out in pairs]
    result = backward(ctx, *grads)
    return result if isinstance(result, tuple) else (result,)


def is_supported(op: torch._ops.OpOverload) -> bool:
    """Whether an operator can be hidden: plain tensors in and out, nothing written to, no effects.

    Lists of tensors are not supported, nor are operators that autocast or effects have a say in.
    """
    schema = op._schema
    if any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        return False
    if not schema.returns or any(str(item.type) != "Tensor" for item in schema.returns):
        return False
    plain = ("Tensor", "Optional[Tensor]")
    if any("Tensor" in str(a.type) and str(a.type) not in plain for a in schema.arguments):
        return False
    return not (torch_private.has_autocast_kernel(op) or torch_private.has_effect(op))


def hidden_op(
    op: torch._ops.OpOverload, non_differentiable: tuple[int, ...]
) -> torch._ops.OpOverload:
    """The operator that stands in for `op`; made once.

    Args:
        op: A custom operator that `is_supported`.
        non_differentiable: Positions of the outputs that its formula marks as such.
    """
    return _define(op._schema.name, str(op._schema), non_differentiable)._opoverload


@functools.cache
def _define(qualname: str, schema: str, non_differentiable: tuple[int, ...]) -> Any:
    op = torch_private.custom_op(qualname)
    _, _, signature = schema.partition("(")
    name = f"{NAMESPACE}::{qualname.replace('::', '__')}"
    name += "".join(f"_{position}" for position in non_differentiable)
    backward_op = _define_backward(f"{name}_backward", qualname, signature)
    tags = {*op.tags, torch.Tag.cudagraph_unsafe} - {torch.Tag.pt2_compliant_tag}

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return torch_private.custom_op(qualname)(*args, **kwargs)

    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: Any,
        keyword_only_inputs: dict[str, Any] | None = None,
    ) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[i] for i in non_differentiable))
        is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        pairs = list(zip(inputs, is_tensor, strict=True))
        ctx.save_for_backward(*(value if yes else None for value, yes in pairs), *outputs)
        ctx.others = [None if yes else value for value, yes in pairs]
        ctx.keyword_only = keyword_only_inputs or {}

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(ctx.others)
        pairs = zip(saved[:count], ctx.others, strict=True)
        inputs = [other if tensor is None else tensor for tensor, other in pairs]
        # the dispatcher drops trailing arguments that equal their defaults, and their flags
        needs = [*ctx.needs_input_grad, *[False] * (count - len(ctx.needs_input_grad))]
        found = iter(
            backward_op(list(saved[count:]), list(grads), needs, *inputs, **ctx.keyword_only)
        )
        return tuple(next(found) if need else None for need in needs)

    made = torch.library.custom_op(
        name, call, mutates_args=(), schema=f"({signature}", tags=tuple(sorted(tags, key=str))
    )
    made.register_fake(call)
    made.register_autograd(backward, setup_context=setup_context)
    stand_ins.register(made._opoverload, str(op))
    return made


def _define_backward(name: str, qualname: str, signature: str) -> Any:
    """The operator that runs a formula: one gradient for each input that needs one.

    Where the formula returns None the gradient is zero: whether it does is known only when it runs.
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
        inputs, keyword_only = bind(op, args, kwargs)
        ctx = FormulaContext(needs)
        with torch_private.autograd_keys_on(), torch.no_grad():
            run_setup(op, ctx, inputs, keyword_only, outputs)
            found = run_backward(op, ctx, grads, outputs)
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
        inputs, _ = bind(torch_private.custom_op(qualname), args, kwargs)
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
    stand_ins.register(made._opoverload, f"backward of {torch_private.custom_op(qualname)}")
    return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _own(grad: torch.Tensor | None, value: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient of `value` laid out as its fake, in memory that nobody else has.

    Args:
        grad: What the formula returned; may be expanded or of another type, as autograd allows.
        value: The input that it belongs to.
        taken: Storages in use; the result's is added.
    """
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
