"""Checkpointing by a function whose backward runs forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import CheckpointError
from cgpass.recompute.ambient import Ambient
from cgpass.recompute.inputs import Arguments, anchor
from cgpass.recompute.numbers import Numbers


@dataclass
class Call:
    """One checkpointed call.

    Attributes:
        fn: What is computed, now and again.
        arguments: Of the call; the function's node holds their tensors.
        numbers: Random number states as they are now.
        ambient: Settings as they are now.
        output: The forward's result, its tensors apart.
    """

    fn: Callable[..., Any]
    arguments: Arguments
    numbers: Numbers
    ambient: Ambient
    output: Arguments | None = None

    def again(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The tensors among the results of a recomputation."""
        with self.numbers.replayed(), self.ambient.entered(), torch.enable_grad():
            leaves = pytree.tree_leaves(self.arguments.call(self.fn, tensors))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        forward: Callable[[], Any],
        anchored: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        del anchored
        ctx.call = call
        ctx.set_materialize_grads(False)
        with call.numbers.forward():
            result = forward()  # with the caller's own lists and dictionaries, which it may fill
        call.output = Arguments((result,), {})
        outputs = call.output.split()
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(out for out in outputs if not _differentiable(out)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        grads: tuple[torch.Tensor | None, ...] = grad_outputs
        if torch.is_grad_enabled():
            raise CheckpointError(
                "cgpass.checkpoint: with use_reentrant=True there are no gradients of gradients (create_graph=True). "
                "Checkpoint with use_reentrant=False."
            )
        if not torch_private.accumulates_everywhere():
            raise CheckpointError(
                "cgpass.checkpoint: with use_reentrant=True the backward fills the .grad of every parameter it meets, "
                "which torch.autograd.grad and backward(inputs=...) don't. Call backward() without inputs "
                "(cgpass.recompute.gradients.gradients returns them), or checkpoint with use_reentrant=False."
            )
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors)
        outputs = call.again(inputs)
        if len(outputs) != len(grads):
            raise CheckpointError(
                f"cgpass.checkpoint: the function returned {len(grads)} tensors in the forward and {len(outputs)} in "
                f"the recomputation. Both runs must compute the same."
            )
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if out.requires_grad and grad is not None
        ]
        _require_same_shapes(pairs)
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _require_same_shapes(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for i, (out, grad) in enumerate(pairs):
        if out.shape != grad.shape:
            raise CheckpointError(
                f"cgpass.checkpoint: output {i} has shape {list(grad.shape)} in the forward and {list(out.shape)} in "
                f"the recomputation. Both runs must compute the same."
            )


def run(call: Call, forward: Callable[[], Any]) -> Any:
    """The forward, without a graph of its own.

    Args:
        call: What is recomputed.
        forward: Runs the function on the caller's own arguments; not kept.

    Returns:
        The function's result. Its floating point tensors require grad whatever the arguments do: parameters that the
        function uses can't be seen from outside.
    """
    tensors = call.arguments.split()
    outputs = _Reentrant.apply(call, forward, anchor(), *tensors)
    assert call.output is not None, "the forward ran"
    return call.output.call(lambda result: result, outputs)
