"""Changes of state that an exception may end anywhere, and what makes up for them.

Note [Changes that are broken off]
    The handler of a signal may raise between any two steps, within a `finally` too; memory may run out anywhere. So a
    change is noted before its first step, with what undoes it wherever it stands, and struck off after its last. What
    is noted and runs no more was broken off: the next call undoes that before it does anything else.

    What an owner's recordings, keys and pools are is one such thing: all recordings go, what is held is left to its
    holders, and calls record again (`Owner.start_anew`). Modes that hold for a while are others, each undone by itself.
    A replay changes nothing that the next one does not set again, and needs none of this.
"""

import sys
import threading
import weakref
from types import FrameType
from typing import Any, Self


class Change:
    """A block that may be broken off, which `undo` makes up for. Not for blocks of generators."""

    _frame: FrameType | None = None

    def __init__(self, among: "list[Change]") -> None:
        """`among` is where it is noted."""
        self._among = among
        self.thread = threading.get_ident()

    def begin(self) -> None:
        """Called first of all in the block."""

    def undo(self) -> None:
        """Leave things as they were before, wherever the block ended, in whatever thread; may be called once more."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._frame = sys._getframe(1)
        self._among.append(self)
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._among.remove(self)
        self._frame = None

    def is_broken_off(self) -> bool:
        """Tell whether nothing runs any more that would end it."""
        running = sys._current_frames().get(self.thread)
        while running is not None and running is not self._frame:
            running = running.f_back
        return running is None


class Mode(Change):
    """A state of this process or thread that holds for a block, and is undone at its end."""

    def __init__(self) -> None:
        super().__init__(open_modes)

    def __enter__(self) -> Self:
        if open_modes:
            mend(open_modes)
        self._frame = sys._getframe(1)
        open_modes.append(self)
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if open_modes[-1] is not self:  # one inside may have been broken off
            mend(open_modes)
        self.undo()
        self._among.remove(self)
        self._frame = None


open_modes: list[Change] = []
"""Of all threads, the innermost last."""


def mend(changes: list[Change]) -> None:
    """Undo what was broken off among some changes."""
    for change in reversed(changes.copy()):
        if change.is_broken_off():
            change.undo()
            if change in changes:  # another thread may have been here
                changes.remove(change)


_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def new_lock() -> Any:
    """A lock that the thread which has it may take again, and that a forked process finds free of other threads."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def forget_other_threads() -> None:
    """In a process that was forked: free the locks and end the modes of threads that are not in it."""
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()
    for change in reversed(open_modes.copy()):
        if change.thread != threading.get_ident():
            change.undo()
            open_modes.remove(change)
