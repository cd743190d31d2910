"""Raises an exception at one line, or before or after one native call, of what runs.

What is left out is where CPython takes no signal: where a `with` statement is about to call `__exit__`, an exception of
a tracing function would skip that, and a lock would stay locked, whatever the code does.
"""

import dis
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

KINDS = ("line", "c_call", "c_return")


class Point(NamedTuple):
    """A place in the code, and which time it is passed."""

    kind: str
    file: str
    line: int
    function: str
    """Of the native function; empty for a line."""
    time: int = 0

    def __str__(self) -> str:
        what = {
            "line": "",
            "c_call": f" before {self.function}",
            "c_return": f" after {self.function}",
        }
        name = self.file.rpartition("cgpass/")[2]
        return f"{name}:{self.line}{what[self.kind]} (time {self.time})"


@functools.cache
def _exits(code: CodeType) -> frozenset[int]:
    """Offsets at which a `with` statement is about to call `__exit__`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "NOP"]
    found = set()
    for k, step in enumerate(steps):
        names = [each.opname for each in steps[k : k + 3]]
        values = [each.argval for each in steps[k : k + 3]]
        is_none = names == ["LOAD_CONST"] * 3 and values == [None] * 3
        if is_none or step.opname in ("PUSH_EXC_INFO", "WITH_EXCEPT_START"):
            found.add(step.offset)
        if is_none and k and steps[k - 1].opname == "SWAP":  # with a value that is returned
            found.add(steps[k - 1].offset)
    return frozenset(found)


class _Hooks:
    """Tracing of this thread and of those that it starts."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = functools.cache(wanted)
        self._on = False

    def see(self, kind: str, frame: FrameType, function: str) -> None:
        raise NotImplementedError

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if self._on and self._wanted(frame.f_code.co_filename) else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._on and frame.f_lasti not in _exits(frame.f_code):
            self.see("line", frame, "")
        return self._trace_line

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._on and event in KINDS and self._wanted(frame.f_code.co_filename):
            name = getattr(argument, "__name__", "?")
            if (event, name) != ("c_call", "__exit__"):
                self.see(event, frame, name)

    @contextmanager
    def running(self, *, lines: bool, calls: bool) -> Iterator[None]:
        before = sys.gettrace(), sys.getprofile()
        self._on = True
        if lines:
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        if calls:
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)
        try:
            yield
        finally:
            self._on = False
            sys.settrace(before[0])
            sys.setprofile(before[1])
            threading.settrace(None)  # type: ignore[arg-type]
            threading.setprofile(None)


class Noted(_Hooks):
    """Notes every point that is passed."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        super().__init__(wanted)
        self.points: list[Point] = []
        self._times: Counter[Point] = Counter()

    def see(self, kind: str, frame: FrameType, function: str) -> None:
        point = Point(kind, frame.f_code.co_filename, frame.f_lineno, function)
        self.points.append(point._replace(time=self._times[point]))
        self._times[point] += 1


class _Fault(_Hooks):
    def __init__(self, point: Point, error: type[BaseException]) -> None:
        super().__init__(lambda name: name == point.file)
        self._point = point
        self._left = point.time
        self._error = error
        self.raised = False

    def see(self, kind: str, frame: FrameType, function: str) -> None:
        point = self._point
        if self.raised or (kind, frame.f_lineno, function) != (
            point.kind,
            point.line,
            point.function,
        ):
            return
        if self._left:
            self._left -= 1
            return
        self.raised = True
        self._on = False
        raise self._error("injected")


@contextmanager
def noted(wanted: Callable[[str], bool]) -> Iterator[list[Point]]:
    """Yields the list of all points in files that are wanted, which a block passes."""
    hooks = Noted(wanted)
    with hooks.running(lines=True, calls=True):
        yield hooks.points


@contextmanager
def fault(point: Point, error: type[BaseException]) -> Iterator[Callable[[], bool]]:
    """Raise an error at a point that a block passes; yields what tells whether it was."""
    hooks = _Fault(point, error)
    with hooks.running(lines=point.kind == "line", calls=point.kind != "line"):
        yield lambda: hooks.raised
