"""`Owner`: what the recordings of one compiled function share, and how all of it is freed."""

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cgpass.runtime.driver import GraphDriver
from cgpass.runtime.liveness import HeldStorages, LiveOutputs

if TYPE_CHECKING:
    import torch


MAX_SLOTS = 16
"""Pools of one owner: how many calls' results may be held while the function still replays."""


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
        self._live = [LiveOutputs()]
        self.lock = threading.RLock()
        self.closed = False
        self._births = 0
        self._members: list[Closeable] = []
        self._pool_addresses: dict[int, int] = {}
        _owners.add(self)

    def youngest(self, slot: int) -> int:
        """Birth of the youngest recording of a slot with a held output. See Note [Birth order]."""
        return self._live[slot].youngest()

    def note_handed_out(self, slot: int, birth: int, held: HeldStorages) -> None:
        """Note that a recording hands out its outputs."""
        self._live[slot].push(birth, held)

    def slot_for(self, num_recordings: int) -> int | None:
        """Where a signature that has so many recordings gets one more, None if too much is held everywhere."""
        if num_recordings < 2:
            return 0
        for slot, live in enumerate(self._live):
            if live.youngest() < 0:
                return slot
        if len(self._live) == MAX_SLOTS:
            return None
        self._live.append(LiveOutputs())
        return len(self._live) - 1

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
            self._live = [
                LiveOutputs()
            ]  # what is still held lies in pools that no graph uses any longer

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
