"""`Placement`: into which pool the recordings of one partition go."""

from collections.abc import Sequence

from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.rerecording import Rerecording


class Placement:
    """Chooses among the owner's slots, and has those laid out anew that something larger is to lie in."""

    def __init__(self, name: str, owner: Owner) -> None:
        """Begin with the first slot.

        Args:
            name: Of the partition, for messages.
            owner: Of the slots.
        """
        self._name = name
        self._owner = owner
        self._first = 0
        """Slots before this one do not suit."""
        self._largest = 0
        """Bytes of the inputs that move, of the largest shape recorded."""

    def slot(
        self, recordings: Sequence[Recording], module: frozenset[int], rerecording: Rerecording
    ) -> int | None:
        """Where to record a signature once more, None if results of too many calls are held, or it is to wait.

        Layers whose parameters come to one place in turn have the first pool for all of their recordings: one that comes
        late waits until all are made anew.

        Args:
            recordings: Those of the signature.
            module: Which layer's parameters they read that come to one place in turn; see `Gathered.module`.
            rerecording: The partition's.
        """
        own = [r for r in recordings if not r.made_for or r.made_for == module]
        slot = self._owner.slot_for(len(own), self._first)
        late = bool(module) and len(own) < 2 and slot != self._first
        if late and rerecording.begin_in_order():
            return None
        return slot if slot is not None else self._owner.warn_of_held(self._name)

    def make_space(self, num_bytes: int) -> None:
        """Before a shape larger than all recorded ones is, drop those: they find room in its memory, not it in theirs.

        Args:
            num_bytes: Of its inputs that move.
        """
        if 0 < self._largest < num_bytes:
            self._owner.start_over()

    def note(self, num_bytes: int) -> None:
        """Note a shape that is recorded, by the bytes of its inputs that move."""
        self._largest = max(self._largest, num_bytes)

    def move_behind(self, slot: int) -> bool:
        """Have recordings lie in a slot after this one from now on; returns whether they may."""
        if not self._owner.may_lie_behind(slot):
            return False
        self._first = max(self._first, slot + 1)
        return True

    def forget_sizes(self) -> None:
        """No shape is recorded any more."""
        self._largest = 0

    def begin_again(self) -> None:
        """Begin with the first slot."""
        self._first = 0
