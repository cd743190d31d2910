"""Gradients by `backward`, for callers that want them returned."""

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def grads_put_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have `tensors` without `.grad` for a block; afterwards each has its own back, the same object.

    **Lifetime:** holds the gradients that it put aside until the block ends.
    """
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
    """What `torch.autograd.grad` returns, where checkpoints with `use_reentrant=True` lie in between.

    Those need a backward pass that accumulates into every `.grad`; what `inputs` have there is put aside for it and
    back after it. Leaves that are not among `inputs` accumulate as in any backward pass.

    Args:
        outputs: Whose gradients are given.
        grad_outputs: One for each of `outputs`.
        inputs: Leaves whose gradients are wanted.
        retain_graph: As for `torch.autograd.backward`.

    Returns:
        A gradient for each of `inputs`, None for what the outputs don't depend on. **Lifetime:** the caller's own.
    """
    with grads_put_aside(inputs):
        torch.autograd.backward(list(outputs), list(grad_outputs), retain_graph=retain_graph)
        return tuple(tensor.grad for tensor in inputs)
