"""What autocast keeps of weights that it cast."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Have autocast cast weights inside rather than take what was cast before: a graph would not make that again.

    It stays off where what runs enters autocast itself: that sets what it was when the context was made, by decoration
    say. Source: torch/amp/autocast_mode.py `autocast.__enter__`, 2.11 to 2.15.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with _kept_off:
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class _KeptOff:
    """Replaces `torch.set_autocast_cache_enabled` as long as any thread is inside; only threads that are notice.

    The last one out restores it: whichever order they come and go in.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._num_inside = 0
        self._lock = threading.Lock()
        self._here = threading.local()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = torch.set_autocast_cache_enabled
                torch.set_autocast_cache_enabled = self._replacement(self._before)
            self._num_inside += 1
        self._here.depth = getattr(self._here, "depth", 0) + 1

    def __exit__(self, *raised: object) -> None:
        self._here.depth -= 1
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                torch.set_autocast_cache_enabled = self._before

    def _replacement(self, set_enabled: Any) -> Any:
        @functools.wraps(set_enabled)
        def call(enabled: bool) -> None:
            set_enabled(enabled and not getattr(self._here, "depth", 0))

        return call


_kept_off = _KeptOff()
