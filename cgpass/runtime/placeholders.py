"""Copied inputs: memory of fixed address that stands for tensors that move."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from cgpass import torch_private

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
    """A view of a tensor's elements as integers if copying kernels don't know its dtype, else the tensor itself."""
    if tensor.dtype in COPIED_AS_THEY_ARE or tensor.is_quantized:
        return tensor
    return tensor.view(_BITS[tensor.dtype.itemsize])


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Give tensors the values of others, on the current stream."""
    if targets[0].dtype in COPIED_AS_THEY_ARE:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        if source.is_conj() or source.is_quantized:
            target.copy_(source)
        else:
            as_bits(target).copy_(as_bits(source))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of `tensor` may share memory (expanded tensors, sliding windows)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * size
    return False


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between `tensor`'s first and last element, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((0 if tensor.numel() == 0 else extent,), (1,))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as one dimension of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory: `tensor` without its conjugate and negative bits, of a dtype that can be copied."""
    plain = torch_private.with_lazy_bits(tensor, conj=tensor.is_conj(), neg=tensor.is_neg())
    return as_bits(plain)


class Placeholder:
    """Memory of fixed address that stands for a copied input.

    Laid out exactly as the input it was made for. Inputs with overlapping elements are copied as the memory they span.
    """

    __slots__ = ("__weakref__", "flat", "lazy", "target", "tensor", "whole")

    def __init__(self, like: torch.Tensor, *, whole_storage: bool = False) -> None:
        conj, neg = like.is_conj(), like.is_neg()
        self.lazy = conj or neg or like.dtype not in COPIED_AS_THEY_ARE
        self.whole = whole_storage
        like = torch_private.with_lazy_bits(like, conj=conj, neg=neg)
        self.flat = overlaps_itself(like)
        if whole_storage:
            self.target = torch.empty_like(bytes_of(like.untyped_storage()))
            self.tensor = torch_private.on_storage(self.target.untyped_storage(), like)
        elif self.flat:
            self.target = torch.empty_like(flat_view(like))
            self.tensor = self.target.as_strided(like.size(), like.stride(), 0)
        else:
            self.target = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device=like.device
            )
            self.tensor = self.target
        self.target = as_bits(self.target)
        self.tensor = torch_private.with_lazy_bits(self.tensor, conj=conj, neg=neg)

    def copy_from(self, value: torch.Tensor) -> None:
        """Give the placeholder the value of `value`."""
        self.target.copy_(self.source(value))

    def copy_to(self, value: torch.Tensor) -> None:
        """Give `value` the placeholder's value: its own elements, not what else lies in its storage."""
        if self.whole:
            memory_of(value).copy_(memory_of(self.tensor))
        else:
            self.source(value).copy_(self.target)

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """What is copied into `target` when the input is `value`."""
        if self.lazy:
            value = memory_of(value)
        if self.whole:
            return bytes_of(value.untyped_storage())
        return flat_view(value) if self.flat else value

    @property
    def is_plain(self) -> bool:
        """Whether `source` gives the input itself."""
        return not (self.flat or self.lazy or self.whole)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class CopyIn:
    """Placeholders of one dtype, filled by one call."""

    __slots__ = ("_odd", "_positions", "_targets", "num_bytes")

    def __init__(self, members: Sequence[tuple[int, Placeholder]]) -> None:
        self._positions = [i for i, _ in members]
        self._targets = [p.target for _, p in members]
        self._odd = [(k, p) for k, (_, p) in enumerate(members) if not p.is_plain]
        self.num_bytes = sum(map(num_bytes, self._targets))

    def copy_from(self, args: Sequence[Any]) -> None:
        """Give the placeholders the values of a call's inputs."""
        sources = [args[i] for i in self._positions]
        for k, placeholder in self._odd:
            sources[k] = placeholder.source(sources[k])
        torch._foreach_copy_(self._targets, sources)


def copies_in(placeholders: Mapping[int, Placeholder]) -> list[CopyIn]:
    """One copy for each dtype among placeholders, by position of their inputs."""
    groups: dict[torch.dtype, list[tuple[int, Placeholder]]] = {}
    for i, placeholder in sorted(placeholders.items()):
        if placeholder.target.numel():
            groups.setdefault(placeholder.target.dtype, []).append((i, placeholder))
    return [CopyIn(members) for members in groups.values()]
