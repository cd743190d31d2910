"""A pool of its own for the parameters that FSDP2 gathers.

Note [Gathered parameters have a pool of their own]
    FSDP2 frees what it gathered after a layer, and allocates it again for the next one. Among all other tensors it would
    come to a new place in many steps, each of which needs a recording: with 16 layers of a Llama some 200 until all was
    recorded or copied. In a pool that holds nothing else the places are the same in every step.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Final

import torch

from cgpass import torch_private

log = logging.getLogger(__name__)
_warn_once: Final = functools.cache(log.warning)

_gathered: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()
"""Storages that FSDP2 gathers into."""
_is_in_use = threading.Lock()
"""Held while something is allocated in a pool: the allocator is told of one once at a time."""


def give_gathered_a_pool() -> None:
    """Have FSDP2 gather into memory of its own from now on. See Note [Gathered parameters have a pool of their own]."""
    torch_private.around_gathering(_allocating, _gathered.setdefault)


@contextlib.contextmanager
def _allocating(device: torch.device) -> Iterator[None]:
    """Have this thread's allocations come from the pool inside, where there can be one."""
    with contextlib.ExitStack() as stack:
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        can_be = device.type == "cuda" and _has_pools() and not is_captured
        if can_be and _is_in_use.acquire(blocking=False):
            stack.callback(_is_in_use.release)
            index = torch.cuda.current_device() if device.index is None else device.index
            try:
                stack.enter_context(torch.cuda.use_mem_pool(_pool(index), device=index))
            except RuntimeError as error:
                _warn_once(
                    "FSDP2's gathered parameters have no memory pool of their own (%s): layers may take more steps until "
                    "they are recorded",
                    str(error).partition("\n")[0],
                )
        yield


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
    alive = [ref() for ref in _gathered.keyrefs()]
    if not any(storage is not None and storage.nbytes() for storage in alive):
        _pool.cache_clear()
