"""Copies of tensors of every dtype: of those that copying kernels don't know, the bits are copied."""

from collections.abc import Sequence
from typing import Final

import torch

COPIED_AS_THEY_ARE: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""Dtypes that `torch._foreach_copy_` has kernels for. `_native.cpp` has the same list.

Source: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu `foreach_tensor_copy_list_kernel_cuda_`, 2.11.
"""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's elements as integers if copying kernels don't know its dtype, else the tensor itself.

    Args:
        tensor: Neither conjugated nor negated lazily.
    """
    if tensor.dtype in COPIED_AS_THEY_ARE or tensor.is_quantized:
        return tensor
    return tensor.view(_BITS[tensor.dtype.itemsize])


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Give tensors the values of others, on the current stream.

    Args:
        targets: Of one dtype.
        sources: One for each, of its size and dtype.
    """
    if targets[0].dtype in COPIED_AS_THEY_ARE:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        if source.is_conj() or source.is_quantized:
            target.copy_(source)
        else:
            as_bits(target).copy_(as_bits(source))
