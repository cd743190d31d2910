"""`StorageSet`: storages known as the objects that they are, not by where they lie."""

import threading
from collections.abc import Iterator

import torch

from cgpass import torch_private

_FEWEST = 16
"""Storages among which it is not worth it to look for those that died."""


class StorageSet:
    """Holds no storage: those that died are in it no more. Any thread may use it.

    Addresses come back in other tensors' storages, and so would the addresses of storage objects, had not each a weak
    reference here.
    """

    def __init__(self) -> None:
        self._refs: dict[int, torch_private.WeakStorage] = {}
        self._full = _FEWEST
        """How many there are when those that died are left out next."""
        self._lock = threading.RLock()  # a collection inside may come back here

    def add(self, storage: torch.UntypedStorage) -> None:
        """Have a storage in it as long as it lives."""
        with self._lock:
            if storage._cdata in self._refs:
                return
            if len(self._refs) >= self._full:
                self._full = 2 * len(self._refs)  # whoever comes back here does not look, too
                for key, ref in self._refs.copy().items():
                    if ref.expired:
                        self._refs.pop(key, None)
                self._full = max(_FEWEST, 2 * len(self._refs))
            self._refs[storage._cdata] = torch_private.WeakStorage(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._refs

    def __iter__(self) -> Iterator[torch.UntypedStorage]:
        with self._lock:
            alive = [ref.get() for ref in self._refs.copy().values()]
        return (storage for storage in alive if storage is not None)

    def __len__(self) -> int:
        """Storages that were added, some of which may have died."""
        return len(self._refs)
