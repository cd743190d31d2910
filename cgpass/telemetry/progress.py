"""One line on a terminal while a compilation or a recording takes long; nothing anywhere else."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final, Literal

DELAY_S: Final = 0.5
"""Time until work is shown."""

Setting = Literal["auto", "off"]


@contextlib.contextmanager
def shown(text: str, setting: Setting) -> Iterator[None]:
    """A block that a line on the terminal tells of if it takes long; one inside it takes the line over."""
    if setting == "off" or not _is_terminal():
        yield
        return
    drawn = threading.Event()
    timer = threading.Timer(DELAY_S, _draw, (f"cgpass: {text} ...", drawn))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if drawn.is_set():
            _draw("", drawn)


def _draw(text: str, drawn: threading.Event) -> None:
    """Clear the line, and draw it; whatever is printed later overwrites it."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\x1b[K{text[: width - 1]}\r")
        sys.stderr.flush()
        drawn.set()


def _is_terminal() -> bool:
    """Tell whether stderr can move its cursor, and no other process of a job shows its own line there."""
    shows = os.environ.get("TERM") != "dumb" and os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.suppress(AttributeError, ValueError):  # what stands in for it, or a closed one
        return shows and sys.stderr.isatty()
    return False
