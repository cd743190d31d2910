"""Gradients by `backward`, for callers that want them returned."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def grads_put_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have `tensors` without `.grad` for a block; afterwards each has its own back, the same object."""
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in zip(tensors, before, strict=True):
            tensor.grad = grad


def gradients(
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return what `torch.autograd.grad` does, where torch's checkpoints with `use_reentrant=True` lie in between.

    Those need a backward pass that accumulates into every `.grad`; what `inputs` (leaves) have there is put aside for
    it. Leaves that are not among `inputs` accumulate as in any backward pass.
    """
    with grads_put_aside(inputs):
        torch.autograd.backward(list(outputs), list(grad_outputs), retain_graph=retain_graph)
        return tuple(tensor.grad for tensor in inputs)
