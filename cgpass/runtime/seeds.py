"""Where attention kernels expect the seed and offset that their dropout was drawn with.

Note [Seeds of attention]
    Memory-efficient attention with dropout returns the generator's seed and offset as two tensors. They lie on the
    host where the operator ran plainly, on the device where it was captured; its backward reads them through a pointer
    to wherever it is called itself. What one partition made in a graph and another reads outside of one, or the other
    way round, has to change places in between.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, 2.11.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgpass import torch_private

Boxed = Callable[[list[Any]], Sequence[Any]]


def read_on_the_host(fn: Boxed, positions: Sequence[int]) -> Boxed:
    """`fn`, with the seeds among its inputs on the host unless a capture runs."""
    if not positions:
        return fn

    def run(args: list[Any]) -> Sequence[Any]:
        if not torch_private.is_capturing():
            for i in positions:
                args[i] = args[i].cpu()
        return fn(args)

    return torch_private.mark_boxed(run)


def put_on_the_device(args: list[Any], positions: Sequence[int], device: torch.device) -> None:
    """Have the seeds among a call's inputs where a graph reads them. Never waits for the device."""
    for i in positions:
        args[i] = args[i].to(device, non_blocking=True)
