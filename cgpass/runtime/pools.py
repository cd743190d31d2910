"""`Pool`: memory that graphs lie in, as torch's allocator knows it."""

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from cgpass import _torch


class Pool:
    """A memory pool and the graphs that keep it in use; whoever replays them keeps them alive.

    Note [Warm-ups have a pool of their own]
        What a warm-up takes and gives back stays the pool's for good, cut up as the warm-up needed it: a capture in the
        same pool finds most of it of the wrong sizes and takes as much again (ViT-S, training: 458 MiB against 350).
        In the ordinary pool a warm-up would leave as much behind, and what outlives it would lie in between. So
        warm-ups have a pool, and the first capture gets a new one. What is free of the old one goes back to the device
        then, and once more when the second capture begins: by then gradients of a warm-up are gone, too.
    """

    def __init__(self, device: int, handle: Any = None) -> None:
        self.is_given = handle is not None
        """Whether it is the user's own, which other graphs may use too."""
        self.handle: Any = handle or torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._device = device
        self._users = 0
        """Warm-ups that keep it in use until a graph does."""
        self._failed = False

    @property
    def is_used(self) -> bool:
        """Whether the allocators take captures into it: not once its last user is gone, or one of them failed."""
        return not self._failed and (bool(self.graphs) or self._users > 0)

    @property
    def is_for_warm_ups(self) -> bool:
        """Whether no graph lies in it, but memory of warm-ups does."""
        return not self.graphs and self._users > 0 and not self.is_given

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Have this thread's allocations come from this pool."""
        _torch.begin_allocating_to_pool(self._device, self.handle)
        self._users += 1
        try:
            yield
        finally:
            _torch.end_allocating_to_pool(self._device, self.handle)

    def end_of_warm_ups(self) -> None:
        """Leave the pool to its graphs."""
        while self._users:
            self._users -= 1
            _torch.release_pool(self._device, self.handle)

    def leave(self) -> None:
        """Use it no more: a failed capture leaves it open in the allocator of host memory, or closes it for good."""
        self._failed = True
        self.end_of_warm_ups()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.end_of_warm_ups()
