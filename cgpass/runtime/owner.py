"""`Owner`: what the recordings of one compiled function share, and how all of it is freed."""

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cgpass.runtime.driver import GraphDriver
from cgpass.runtime.liveness import LiveOutputs

if TYPE_CHECKING:
    import torch


class Closeable(Protocol):
    """Something that an owner frees."""

    def close(self) -> None:
        """Free graphs and memory."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a runner records. See `cgpass.Options` for the meaning of each."""

    num_warmup_calls: int = 1
    max_recordings: int = 64
    max_static_sets: int = 256
    max_rerecords: int = 128


class Owner:
    """Driver (with its pool and stream), order of recordings, live outputs of a compiled function."""

    def __init__(self, driver: GraphDriver) -> None:
        """Args: driver: records and replays; its pool is this owner's."""
        self.driver = driver
        self.live = LiveOutputs()
        self.lock = threading.RLock()
        self.closed = False
        self._births = 0
        self._members: list[Closeable] = []
        self._pool_addresses: dict[int, int] = {}
        _owners.add(self)

    def next_birth(self) -> int:
        """Position of one more recording in the order of recordings."""
        self._births += 1
        return self._births

    def add(self, member: Closeable) -> None:
        """Have `member` closed with this owner."""
        self._members.append(member)

    def add_pool_storage(self, tensor: "torch.Tensor") -> None:
        """Note that a recording's output lies where `tensor` does."""
        address = tensor.untyped_storage().data_ptr()
        self._pool_addresses[address] = self._pool_addresses.get(address, 0) + 1

    def drop_pool_storage(self, tensor: "torch.Tensor") -> None:
        """Undo one `add_pool_storage`."""
        address = tensor.untyped_storage().data_ptr()
        left = self._pool_addresses.pop(address, 0) - 1
        if left > 0:
            self._pool_addresses[address] = left

    def is_pool_storage(self, tensor: "torch.Tensor") -> bool:
        """Whether `tensor` lies in the output of a recording."""
        return tensor.untyped_storage().data_ptr() in self._pool_addresses

    def release(self) -> None:
        """Free every recording. Calls made afterwards warm up and record again."""
        with self.lock:
            for member in self._members:
                member.close()

    def close(self) -> None:
        """Free every recording. Calls made afterwards run without a graph."""
        self.closed = True
        self.release()


_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()
"""Owners are kept alive by the compiled functions that use them."""


def release_all() -> None:
    """Free every recording of this process."""
    for owner in list(_owners):
        owner.release()
