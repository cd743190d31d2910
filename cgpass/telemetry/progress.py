"""One line on a terminal while a compilation or a recording takes long; nothing anywhere else."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, Literal, TextIO

DELAY_S: Final = 0.5
"""How long something takes before it is shown."""
_TICK_S: Final = 0.25
_ERASE: Final = "\r\x1b[K"
"""To the line's begin, and clear it."""

Setting = Literal["auto", "off"]

_lock: Final = threading.Lock()
_texts: Final[list[str]] = []
"""What is being done, the innermost last."""


def _draw(stream: TextIO, ended: threading.Event) -> None:
    """Draw the line until what it tells of is over; whatever is printed meanwhile overwrites it."""
    since, drawn = time.monotonic(), False
    wait = DELAY_S
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        while not ended.wait(wait):
            wait, width = _TICK_S, os.get_terminal_size(stream.fileno()).columns or 80
            with _lock:
                text = f"cgpass: {_texts[-1] if _texts else ''} ({time.monotonic() - since:.0f} s)"
            stream.write(f"{_ERASE}{text[: width - 1]}\r")
            stream.flush()
            drawn = True
        if drawn:
            stream.write(_ERASE)
            stream.flush()


@contextlib.contextmanager
def shown(text: str, setting: Setting) -> Iterator[None]:
    """A block that a line on the terminal tells of if it takes long; of blocks within others the innermost is told of.

    Args:
        text: What is done.
        setting: "off" for no line, whatever stderr is.
    """
    stream = sys.stderr
    if setting == "off" or not _is_terminal(stream):
        yield
        return
    with _lock:
        _texts.append(text)
        is_first = len(_texts) == 1
    ended = threading.Event()
    thread = threading.Thread(
        target=_draw, args=(stream, ended), name="cgpass-progress", daemon=True
    )
    if is_first:
        thread.start()
    try:
        yield
    finally:
        with _lock:
            _texts.remove(text)
        if is_first:
            ended.set()
            thread.join()


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can move its cursor, where no other process of a job shows its own line."""
    if os.environ.get("TERM") == "dumb" or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # what stands in for a stream, or a closed one
        return False
