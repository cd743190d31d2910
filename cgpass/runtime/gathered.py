"""A pool of its own for the parameters that FSDP2 gathers.

Note [Gathered parameters have a pool of their own]
    FSDP2 frees what it gathered after a layer, and allocates it again for the next one. Among all other tensors it would
    come to a new place in many steps, each of which needs a recording: with 16 layers of a Llama some 200 until all was
    recorded or copied. In a pool that holds nothing else the places are the same in every step.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime.owner import StorageSet

log = logging.getLogger(__name__)

_gathered = StorageSet()
"""Storages that FSDP2 gathers into."""
_is_in_use = threading.Lock()
"""Held while something is allocated in a pool."""


def give_gathered_a_pool() -> None:
    """Have FSDP2 gather into memory of its own from now on. See Note [Gathered parameters have a pool of their own]."""
    torch_private.around_gathering(_begin, _gathered.add)


def _begin(device: torch.device) -> Callable[[], None] | None:
    """Have this thread's allocations come from the pool until what is returned is called; None if they do not."""
    if device.type != "cuda" or not _has_pools() or torch.cuda.is_current_stream_capturing():
        return None
    if not _is_in_use.acquire(blocking=False):  # the allocator is told of a pool once at a time
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        pool = _pool(index)
        torch_private.begin_allocating_to_pool(index, pool.id)
    except BaseException as error:
        _is_in_use.release()
        if not isinstance(error, RuntimeError):
            raise
        _note_refusal(str(error))
        return None
    return functools.partial(_end, index, pool.id)


@functools.cache
def _note_refusal(why: str) -> None:
    log.warning(
        "what FSDP2 gathers lies among other tensors, since torch gives it no memory pool of its own (%s): layers may "
        "take more steps until they are recorded",
        why.partition("\n")[0],
    )


def _end(device: int, handle: Any) -> None:
    try:
        torch_private.end_allocating_to_pool(device, handle)
        torch_private.release_pool(device, handle)
    finally:
        _is_in_use.release()


@functools.cache
def _has_pools() -> bool:
    """Tell whether the allocator knows pools: CUDA's own asynchronous one and those of users don't."""
    try:
        return torch.cuda.get_allocator_backend() == "native"
    except RuntimeError:  # a user's
        return False


@functools.cache
def _pool(device: int) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def give_pool_back() -> None:
    """Let the pool's memory go, unless something that lies in it is in use."""
    if not any(storage.nbytes() for storage in _gathered):
        _pool.cache_clear()
