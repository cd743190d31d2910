"""What a capture runs in: nothing is collected or destroyed meanwhile.

Note [Destruction during a capture]
    Destroying a graph frees device memory and gives back its pool, which a capture that runs at the same time does
    not survive on every driver. Graphs are dropped by whoever drops a compiled function last: another thread, or an
    operator inside the capture. So graphs are reset through `when_no_capture_runs`, which waits for the last
    capture of the process to end.

Note [Streams of autograd's nodes]
    A leaf's node that adds to its `.grad` runs on the stream that it was made on. One that was made before a capture,
    on the user's stream, would take part of a captured backward out of the graph, or end the capture. Where torch can
    have such nodes run on the stream that is captured, it is told to while one of our captures runs, and only then.
"""

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator

from cgpass import torch_private

_lock = threading.RLock()  # a collection inside may come back here
_running = 0
_stale_followed = False
"""What the user has set, while a capture runs. See Note [Streams of autograd's nodes]."""
_waiting: list[Callable[[], None]] = []
_pausing = 0
"""Blocks that want no garbage collection now."""
_collects = True
"""Whether it went on before the first of them began."""


@contextlib.contextmanager
def capture_runs() -> Iterator[None]:
    """Note that a capture runs inside. See Note [Destruction during a capture]."""
    global _running, _stale_followed
    with _lock:
        _running += 1
        if _running == 1:
            _stale_followed = torch_private.have_stale_streams_follow(True)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                torch_private.have_stale_streams_follow(_stale_followed)
        _run_waiting()


def is_any_capture_running() -> bool:
    """Whether any thread of this process records right now."""
    return _running > 0


def when_no_capture_runs(destroy: Callable[[], None]) -> None:
    """Call `destroy` now, or after the last capture that runs now."""
    with _lock:
        _waiting.append(destroy)
    _run_waiting()


def _run_waiting() -> None:
    while True:
        with _lock:
            if _running or not _waiting:
                return
            destroy = _waiting.pop(0)
        destroy()


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """No garbage collection inside: a collected tensor's or graph's destructor may touch the device.

    The last block that ends has it go on, if it went on before the first one began.
    """
    global _pausing, _collects
    with _lock:
        if not _pausing:
            _collects = gc.isenabled()
        _pausing += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pausing -= 1
            if not _pausing and _collects:
                gc.enable()


@contextlib.contextmanager
def may_be_empty() -> Iterator[None]:
    """Have torch say nothing of a captured graph without work."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield
