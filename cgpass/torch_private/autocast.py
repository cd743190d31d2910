"""What autocast keeps of weights that it cast."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cgpass.torch_private.replacing import Replaced


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


def _set_off(set_enabled: Callable[[bool], None], enabled: bool, *more: Any) -> None:
    del enabled, more
    set_enabled(False)


_kept_off = Replaced(lambda: torch, "set_autocast_cache_enabled", _set_off)
