"""One line on a terminal while a compilation or a recording takes long.

It is drawn by a thread of its own, from the first half second on, and is gone before whoever waited goes on. Nothing
else is ever written: not where stderr is no terminal, nor to any log.
"""

import contextlib
import logging
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


class _Line(logging.Filter):
    """The line, from its first text to its last; as a filter of other handlers' messages it makes way for them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.texts: list[str] = []
        """What is being done, the innermost last."""
        self._stream = stream
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._drawn: str | None = None
        self._handlers: list[logging.Handler] = []
        threading.Thread(target=self._run, name="cgpass-progress", daemon=True).start()

    def _run(self) -> None:
        if self._ended.wait(DELAY_S):
            return
        with self._lock:
            self._handlers = _handlers_on_terminals()
            for handler in self._handlers:
                handler.addFilter(self)
        while not self._ended.is_set():
            self._draw()
            self._ended.wait(_TICK_S)
        for handler in self._handlers:
            handler.removeFilter(self)

    def _draw(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            texts = self.texts[-1:]
            if self._ended.is_set() or not texts:
                return
            text = f"cgpass: {texts[0]} ({time.monotonic() - self._since:.0f} s)"
            if text == self._drawn:
                return
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
            # The cursor is left where whatever else is printed overwrites the line.
            self._stream.write(f"{_ERASE}{text[: width - 1]}\r")
            self._stream.flush()
            self._drawn = text

    def filter(self, record: logging.LogRecord) -> bool:
        """Make way for a message."""
        del record
        self._erase()
        return True

    def _erase(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._drawn is not None:
                self._drawn = None
                self._stream.write(_ERASE)
                self._stream.flush()

    def end(self) -> None:
        """Leave the terminal as if there had been no line."""
        self._ended.set()
        self._erase()


def _handlers_on_terminals() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [h for each in loggers if isinstance(each, logging.Logger) for h in each.handlers]
    found += [logging.lastResort] if logging.lastResort is not None else []
    return [
        handler
        for handler in dict.fromkeys(found)
        if isinstance(handler, logging.StreamHandler) and _is_terminal(handler.stream)
    ]


_lock: Final = threading.Lock()
_lines: Final[list[_Line]] = []
"""The line there is, if there is one."""


@contextlib.contextmanager
def shown(text: str, setting: Setting) -> Iterator[None]:
    """A block that a line on the terminal tells of if it takes long; of blocks within others the innermost is told of.

    Args:
        text: What is done.
        setting: "off" for no line, whatever stderr is.
    """
    stream = sys.stderr
    if setting == "off" or not _is_terminal(stream) or _is_elsewhere():
        yield
        return
    with _lock:
        if not _lines:
            _lines.append(_Line(stream))
        line = _lines[0]
        line.texts.append(text)
    try:
        yield
    finally:
        with _lock:
            line.texts.remove(text)
            if not line.texts:
                _lines.clear()
                line.end()


def _is_elsewhere() -> bool:
    """Whether the terminal can't move its cursor, or another process of a job shows its own line there."""
    return os.environ.get("TERM") == "dumb" or os.environ.get("LOCAL_RANK", "0") != "0"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # what stands in for a stream, or a closed one
        return False
