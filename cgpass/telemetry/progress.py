"""One line on a terminal while a compilation or a recording takes long; nothing anywhere else."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, Literal

DELAY_S: Final = 0.5
"""Time until work is shown, and between updates of the line."""
_ERASE: Final = "\r\x1b[K"
"""To the line's begin, and clear it."""

Setting = Literal["auto", "off"]

_texts: Final[list[str]] = []
"""Work in progress, the innermost last."""


@contextlib.contextmanager
def shown(text: str, setting: Setting) -> Iterator[None]:
    """A block that a line on the terminal tells of if it takes long; of blocks within others the innermost is told of."""
    if setting == "off" or not _is_terminal():
        yield
        return
    _texts.append(text)
    ended = threading.Event()
    drawing = threading.Thread(target=_draw, args=(ended,), name="cgpass-progress", daemon=True)
    if is_first := len(_texts) == 1:
        drawing.start()
    try:
        yield
    finally:
        _texts.remove(text)
        if is_first:
            ended.set()
            drawing.join()


def _draw(ended: threading.Event) -> None:
    """Draw the line until what it tells of is over; whatever is printed meanwhile overwrites it."""
    stream, since, drawn = sys.stderr, time.monotonic(), False
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        while not ended.wait(DELAY_S):
            width = os.get_terminal_size(stream.fileno()).columns or 80
            text = f"cgpass: {''.join(_texts[-1:])} ({time.monotonic() - since:.0f} s)"
            stream.write(f"{_ERASE}{text[: width - 1]}\r")
            stream.flush()
            drawn = True
        if drawn:
            stream.write(_ERASE)
            stream.flush()


def _is_terminal() -> bool:
    """Tell whether stderr can move its cursor, and no other process of a job shows its own line there."""
    shows = os.environ.get("TERM") != "dumb" and os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.suppress(AttributeError, ValueError):  # what stands in for it, or a closed one
        return shows and sys.stderr.isatty()
    return False
