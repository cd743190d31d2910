"""Surrounds a capture, so that nothing is collected or destroyed meanwhile.

Note [Destruction during a capture]
    Destroying a graph frees device memory and gives back its pool, which a capture that runs at the same time does
    not survive on every driver. Graphs are dropped by the last holder of a compiled function: another thread, or an
    operator inside the capture. So graphs are reset through `when_no_capture_runs`, which waits for the last
    capture of the process to end.
"""

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator

from cgpass import torch_private
from cgpass.runtime import changes
from cgpass.runtime.changes import Mode

_lock = changes.new_lock()  # a collection inside may come back here
_waiting: list[Callable[[], None]] = []
_left: list[Callable[[], None]] = []
"""Of a process that was forked: what waited there then. Nothing on the device may be destroyed here."""
_pausing: "list[Pause]" = []
"""Those that want no garbage collection now; captures are among them."""
_collects = True
"""True if it went on before the first of them began."""


class Pause(Mode):
    """No garbage collection inside: a collected tensor's or graph's destructor may touch the device.

    The last block that ends has it go on, if it went on before the first one began.
    """

    def begin(self) -> None:
        """See `Change`."""
        global _collects
        with _lock:
            if not _pausing:
                _collects = gc.isenabled()
            _pausing.append(self)
            gc.disable()

    def undo(self) -> None:
        """See `Change`."""
        with _lock:
            if self in _pausing:
                _pausing.remove(self)
            if not _pausing and _collects:
                gc.enable()


class Capture(Pause):
    """A capture runs inside. Modes that watch it, and are not left where an exception ends it, are left here."""

    _stacks: tuple[int, int] | None = None

    def begin(self) -> None:
        """See `Change`."""
        super().begin()
        self._stacks = torch_private.mode_stacks()

    def undo(self) -> None:
        """See `Change`."""
        if self._stacks is not None and self.thread == threading.get_ident():
            torch_private.leave_modes_above(self._stacks)
        super().undo()
        _run_waiting()


def captures() -> "list[Capture]":
    """Return the captures of this process that run now."""
    return [each for each in _pausing.copy() if isinstance(each, Capture)]  # others end theirs


def is_capturing_here() -> bool:
    """Tell whether this thread records right now."""
    thread = threading.get_ident()
    return any(capture.thread == thread for capture in captures())


def when_no_capture_runs(destroy: Callable[[], None]) -> None:
    """Call `destroy` now, or after the last capture that runs now."""
    with _lock:
        _waiting.append(destroy)
    _run_waiting()


def _run_waiting() -> None:
    while True:
        with _lock:
            if captures() or not _waiting:
                return
            destroy = _waiting.pop(0)
        destroy()


def _go_on_without_others() -> None:
    """In a process that was forked: what other threads had under way is not in it."""
    _left.extend(_waiting)
    _waiting.clear()
    changes.forget_other_threads()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_go_on_without_others)


@contextlib.contextmanager
def may_be_empty() -> Iterator[None]:
    """Have torch say nothing of a captured graph without work."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield
