"""Storages and their addresses."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view whose conjugate and negative bits are flipped where asked for."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


def tensor_at_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that reads the memory where `tensor` lies now, whatever becomes of `tensor`'s storage.

    **Lifetime:** owns nothing; the caller keeps the memory alive.
    """
    storage = tensor.untyped_storage()
    raw = storage_at(storage.data_ptr(), storage.nbytes(), tensor.device)
    return on_storage(raw, tensor)


def on_storage(
    storage: torch.UntypedStorage, like: torch.Tensor, *, offset: int | torch.SymInt | None = None
) -> torch.Tensor:
    """A tensor laid out as `like` on a storage, from an offset in elements on; by default that of `like`."""
    out = torch.empty(0, dtype=like.dtype, device=like.device)
    offset = like.storage_offset() if offset is None else offset
    with torch.no_grad():
        out.set_(storage, offset, like.size(), like.stride())
    return with_lazy_bits(out, conj=like.is_conj(), neg=like.is_neg())


def has_gaps(tensor: torch.Tensor) -> bool:
    """Tell if a tensor leaves out elements between its first and its last, as a slice does, or has some twice.

    Source: aten/src/ATen/MemoryOverlap.cpp, 2.11 to 2.15.
    """
    return torch._debug_has_internal_overlap(tensor) != 0


def storage_at(address: int, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage that lies where it is told to. **Lifetime:** owns nothing; the caller keeps the memory alive."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return storage  # an UntypedStorage, whatever the stub says


is_zero_tensor: Callable[[torch.Tensor], bool] = torch._is_zerotensor
"""True if a tensor stands for zeros and has no memory; forward-mode AD makes such."""


class WeakStorage(StorageWeakRef):
    """Knows whether a storage has died: see `expired`.

    Source: torch/multiprocessing/reductions.py, 2.11 to 2.15.
    """

    def get(self) -> torch.UntypedStorage | None:
        """The storage, None if it has died."""
        return None if self.expired() else torch.UntypedStorage._new_with_weak_ptr(self.cdata)


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Tell if a size, stride or offset of a tensor is symbolic; of some that are not strided it is said, too."""
    return tensor._has_symbolic_sizes_strides
