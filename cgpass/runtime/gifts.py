"""`Gifts`: inputs that die inside a recording, as they would inside the partition without graphs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgpass import _torch
from cgpass.runtime import fast
from cgpass.runtime.owner import Owner

if TYPE_CHECKING:
    from cgpass.runtime.recording import Recording


class Gifts:
    """Blocks of earlier recordings that nobody but this call's inputs holds, handed over for one capture.

    The callable drops them where it needs them no longer, and later temporaries and outputs lie on them: saved tensors
    die inside the backward. A replay therefore overwrites them, and asks `Recording.may_replay` first.
    """

    def __init__(self, owner: Owner, slot: int, args: Sequence[Any], pooled: Sequence[int]) -> None:
        """Find them; nobody but `args` may hold these inputs here.

        Args:
            owner: Of the recordings.
            slot: Pool that is recorded into.
            args: The call's inputs.
            pooled: Those that earlier recordings may have made.
        """
        self._args = args
        groups: dict[int, list[int]] = {}
        for i in pooled:
            groups.setdefault(args[i].untyped_storage().data_ptr(), []).append(i)
        self._given: list[tuple[Recording, int, list[int], int]] = []
        for address, positions in groups.items():
            found = owner.block_at(slot, address)
            if found is None:
                continue
            recording, number, references = found
            users = references + len(positions)
            if fast.exclusive(args, positions, [users] * len(positions)):
                self._given.append((recording, number, positions, users))
        self._lent: list[_torch.WeakStorage] = []

    def put_into(self, inputs: list[Any]) -> None:
        """Replace inputs by tensors that own their memory."""
        for recording, number, positions, _ in self._given:
            storage = recording.memory.give(number)
            self._lent.append(_torch.WeakStorage(storage))
            for i in positions:
                inputs[i] = _torch.on_storage(storage, self._args[i])

    def take_back(self) -> dict[int, int]:
        """Return what did not die; tells the inputs that did, and how many users their storages may have."""
        consumed: dict[int, int] = {}
        for (recording, number, positions, users), weak in zip(
            self._given, self._lent, strict=False
        ):
            storage = weak.get()
            if storage is None:
                consumed.update(dict.fromkeys(positions, users))
            else:
                recording.memory.take_back(number, storage)
        return consumed
