"""`StorageSet`: storages known as the objects that they are, not by where they lie."""

from collections.abc import Iterator

import torch

from cgpass import _torch


class StorageSet:
    """Holds no storage: those that died are in it no more.

    Addresses come back in other tensors' storages, and so would the addresses of storage objects, had not each a weak
    reference here.
    """

    def __init__(self) -> None:
        """Nothing is in it."""
        self._refs: dict[int, _torch.WeakStorage] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Have a storage in it as long as it lives."""
        if storage._cdata in self._refs:
            return
        if (
            len(self._refs) & (len(self._refs) - 1) == 0
        ):  # a power of two: not for each of thousands
            for key in [key for key, ref in list(self._refs.items()) if ref.expired]:
                self._refs.pop(key, None)
        self._refs[storage._cdata] = _torch.WeakStorage(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._refs

    def __iter__(self) -> Iterator[torch.UntypedStorage]:
        alive = (ref.get() for ref in list(self._refs.values()))
        return (storage for storage in alive if storage is not None)

    def __len__(self) -> int:
        """Storages that were added, some of which may have died."""
        return len(self._refs)
