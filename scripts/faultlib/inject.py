"""Raises an exception at one line, or before or after one native call, of what runs.

What is left out is where CPython takes no signal, and an exception of a tracing function would leave a lock locked,
whatever the code does: at `try:` inside of a `with` statement, and where that is about to call `__exit__`.
"""

import dis
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
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
        when = {"line": "", "c_call": " before ", "c_return": " after "}[self.kind]
        name = self.file.rpartition("cgpass/")[2]
        return f"{name}:{self.line}{when}{self.function} (time {self.time})"


@functools.cache
def _exits(code: CodeType) -> frozenset[int]:
    """Offsets at which a `with` statement is about to call `__exit__`."""
    steps = list(dis.get_instructions(code))
    found = set()
    for k, step in enumerate(steps):
        names = [each.opname for each in steps[k : k + 3]]
        values = [each.argval for each in steps[k : k + 3]]
        if names == ["LOAD_CONST"] * 3 and values == [None] * 3:
            found.add(step.offset)
            before = k - 1
            while steps[before].opname in ("NOP", "SWAP"):  # with a value that is returned
                found.add(steps[before].offset)
                before -= 1
        elif step.opname in ("PUSH_EXC_INFO", "WITH_EXCEPT_START", "NOP"):
            found.add(step.offset)
    return frozenset(found)


@contextmanager
def _seen(
    wanted: Callable[[str], bool], see: Callable[[str, FrameType, str], None], kinds: Container[str]
) -> Iterator[None]:
    """Show what this thread, and those that it starts, pass in files that are wanted."""
    wanted = functools.cache(wanted)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not wanted(frame.f_code.co_filename):
            return None
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            see("line", frame, "")
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in kinds and wanted(frame.f_code.co_filename):
            name = getattr(argument, "__name__", "?")
            if (event, name) != ("c_call", "__exit__"):
                see(event, frame, name)

    before = sys.gettrace(), sys.getprofile()
    if "line" in kinds:
        threading.settrace(trace)
        sys.settrace(trace)
    if "c_call" in kinds:
        threading.setprofile(profile)
        sys.setprofile(profile)
    try:
        yield
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        threading.settrace(None)  # type: ignore[arg-type]
        threading.setprofile(None)


@contextmanager
def noted(wanted: Callable[[str], bool]) -> Iterator[list[Point]]:
    """Yields the list of all points in files that are wanted, which a block passes."""
    points: list[Point] = []
    times: Counter[Point] = Counter()

    def see(kind: str, frame: FrameType, function: str) -> None:
        point = Point(kind, frame.f_code.co_filename, frame.f_lineno, function)
        points.append(point._replace(time=times[point]))
        times[point] += 1

    with _seen(wanted, see, KINDS):
        yield points


@contextmanager
def fault(point: Point, error: type[BaseException]) -> Iterator[Callable[[], bool]]:
    """Raise an error at a point that a block passes; yields what tells whether it was."""
    left = point.time + 1

    def see(kind: str, frame: FrameType, function: str) -> None:
        nonlocal left
        if (kind, frame.f_lineno, function) == (point.kind, point.line, point.function):
            left -= 1
            if left == 0:
                raise error("injected")

    kinds = KINDS[:1] if point.kind == "line" else KINDS[1:]
    with _seen(lambda name: name == point.file, see, kinds):
        yield lambda: left <= 0
