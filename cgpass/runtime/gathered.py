"""Parameters that have memory only while they are used, as FSDP's.

Note [Gathered parameters have a pool of their own]
    FSDP2 frees what it gathered after a layer, and allocates it again for the next one. Among all other tensors it would
    come to a new place in many steps, each of which needs a recording: with 16 layers of a Llama some 200 until all was
    recorded or copied. In a pool that holds nothing else the places are the same in every step.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from cgpass import _torch
from cgpass.runtime.storage_set import StorageSet

log = logging.getLogger(__name__)

_gathered = StorageSet()
"""Storages that FSDP2 gathers into."""
_is_in_use = threading.Lock()
"""Held while something is allocated in a pool."""


def give_gathered_a_pool() -> None:
    """Have FSDP2 gather into memory of its own from now on. See Note [Gathered parameters have a pool of their own]."""
    _torch.around_gathering(_begin, _gathered.add)


def _begin(device: torch.device) -> Callable[[], None] | None:
    """Have this thread's allocations come from the pool until what is returned is called; None if they do not."""
    if device.type != "cuda" or not _has_pools() or torch.cuda.is_current_stream_capturing():
        return None
    if not _is_in_use.acquire(blocking=False):  # the allocator is told of a pool once at a time
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        pool = _pool(index)
        _torch.begin_allocating_to_pool(index, pool.id)
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
        _torch.end_allocating_to_pool(device, handle)
        _torch.release_pool(device, handle)
    finally:
        _is_in_use.release()


@functools.cache
def _has_pools() -> bool:
    """Whether the allocator knows pools: CUDA's own asynchronous one and those of users don't."""
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


_LOOKS: Final = 256
"""Calls without a replay in which it is looked for."""


class Gathered:
    """Finds inputs that FSDP2 gathers, or whose storages were emptied after a call; tells modules apart by them.

    Layers that share code, and whose parameters are gathered in one place, have one signature, but recordings of their
    own: they run one after the other, with what the ones before left for the backward. In the first round each layer
    warms up for itself, so that all of them are recorded in the order of one step: a layer that came later than the
    others would need memory apart from theirs.
    """

    def __init__(self, parameters: Iterable[int]) -> None:
        """Args: parameters: inputs that may be gathered."""
        self._watched = tuple(parameters)
        self._last: list[tuple[int, _torch.WeakStorage]] = []
        self._looks = 0
        self._positions: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Have every module warm up again."""
        self._seen: set[tuple[int, ...]] = set()
        self._is_first_round = bool(self._watched)

    @property
    def any(self) -> bool:
        """Whether some were found."""
        return bool(self._positions)

    def note(self, args: Sequence[Any], *, is_late: bool = False) -> bool:
        """Note a call's inputs, and what became of the last one's. **Lifetime:** holds none of them.

        Args:
            args: The inputs.
            is_late: Whether this can't be the first round any more.

        Returns:
            Whether they are gathered, and the module is to warm up for itself.
        """
        if self._looks >= _LOOKS and not self._is_first_round:
            return False
        storages = [args[i].untyped_storage() for i in self._watched]
        if self._looks < _LOOKS:
            self._looks += 1
            found = list(zip(self._watched, storages, strict=True))
            self._positions |= {i for i, ref in self._last if _is_empty(ref)}
            self._positions |= {i for i, storage in found if storage in _gathered}
            self._last = [(i, _torch.WeakStorage(storage)) for i, storage in found]
        if not self._is_first_round:
            return False
        module = tuple(storage._cdata for storage in storages)
        if is_late or module in self._seen:
            self._is_first_round = False
            self._seen.clear()
            return False
        self._seen.add(module)
        return self.any

    def module(self, args: Sequence[Any]) -> frozenset[int]:
        """Which module a call is of, by its gathered parameters' storages; nothing where none are gathered."""
        return frozenset(args[i].untyped_storage()._cdata for i in self._positions)


def _is_empty(ref: _torch.WeakStorage) -> bool:
    storage = ref.get()
    return storage is not None and storage.nbytes() == 0
