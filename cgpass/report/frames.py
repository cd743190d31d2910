"""Functions that `torch.compile` left to eager: no graph of theirs reaches a backend, so torch's own notes tell of them."""

import ast
import contextlib
import linecache
import os
import re
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from cgpass import telemetry, torch_private
from cgpass.compile.facts.breaks import given_up
from cgpass.compile.facts.lines import function_name
from cgpass.report.model import EagerFunction, ReasonReport
from cgpass.telemetry.reason import OTHER_FIXES, OTHER_OPTIONS, Reason, ways

_NOTED: Final = 4096
"""Compilations of a process that are looked through; torch keeps less."""
_AT_LIMIT: Final = "recompile limit exceeded"
_LIMIT: Final = re.compile(r"exceeding the (\w+) .*currently set to (\d+)")
_VERSION: Final = re.compile(r"^\[?\d+/\d+\]?: ")
_HINT: Final = re.compile(r"\(HINT: (.*)\)\s*$")
_OTHER_BACKEND: Final = "BACKEND_MATCH"
WRAPPER: Final = os.path.join("torch", "_dynamo", "external_utils.py")
"""Holds the function as which Dynamo compiles modules of torch's. Source: `wrap_inline`, 2.11 to 2.15."""
_SOURCE: Final = re.compile(r"^(.*?)\s+# (.*?)\s*# (\S+):(\d+) in (\S+)")
"""A guard, with the line that needs it."""


@contextlib.contextmanager
def noted() -> Iterator[list[Any]]:
    """Have torch note more compilations, from the first graph on if Dynamo is not loaded yet; gives what it noted."""
    before: list[int] = []

    def more(*_: object) -> None:
        if not before:
            limit = torch_private.note_compilations(_NOTED)
            before.extend([] if limit is None else [limit])

    end = telemetry.listen(more)
    more()
    try:
        yield torch_private.compilations()
    finally:
        end()
        if before:
            torch_private.note_compilations(before[0])


Function = tuple[Any, ...]
"""File, first line and name; of a function that is not known, what torch numbers it."""


def left_to_eager(
    before: Sequence[Any] = (), *, again: Collection[Function] = ()
) -> tuple[EagerFunction, ...]:
    """Functions whose last compilation was given up.

    Args:
        before: What had been noted; what is among it does not count.
        again: Functions of which it does count.
    """
    known = set(map(id, before))
    return tuple(
        _described(function, each)
        for function, each in _last(torch_private.compilations()).items()
        if torch_private.was_given_up(each) and (id(each) not in known or function in again)
    )


def at_limit() -> tuple[EagerFunction, ...]:
    """Functions that cgpass compiled as often as torch allows, so that calls which fit nothing compiled run in eager.

    A note without its function's name may be from before a reset.
    """
    last = _last(_since_reset(torch_private.compilations()))
    return tuple(
        _described(function, each)
        for function, each in last.items()
        if _is_at_limit(each) and torch_private.is_ours(each) and len(function) > 1
    )


class Watch:
    """Looks which functions calls run, and by that knows what torch noted some time ago and still holds.

    Torch notes nothing again of functions that were given up, nor of graph breaks of what is compiled.
    """

    def __init__(self, notes: Sequence[Any], behind: Collection[types.CodeType]) -> None:
        """Find what may still hold.

        Args:
            notes: Of compilations until now, oldest first.
            behind: Code of the functions in question.
        """
        self._given_up = {
            function
            for function, each in _last(_since_reset(notes)).items()
            if torch_private.was_given_up(each) and any(_is_of(function, code) for code in behind)
        }
        self._before = torch_private.graph_breaks()
        self._seen: list[torch_private.GraphBreak] | None = None
        """Graph breaks that were noted before calls were watched; None if none were."""
        self._ran: set[types.CodeType] = set()
        self._met: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls that are made inside, unless somebody else's profiler does."""
        seen = torch_private.graph_breaks()
        if not (self._given_up or seen) or sys.getprofile() is not None:
            yield
            return
        self._seen = seen if self._seen is None else self._seen
        ran: dict[int, types.CodeType] = {}

        def note(frame: types.FrameType, event: str, _: object) -> None:
            if event == "call":
                ran[id(frame.f_code)] = frame.f_code

        sys.setprofile(note)
        try:
            yield
        finally:
            if sys.getprofile() is note:  # else what was called began to profile
                sys.setprofile(None)
        codes = _Identities(ran)
        self._met |= {id(each) for each in self._seen if each.was_met_by(codes)}
        self._ran |= set(ran.values())

    @property
    def given_up(self) -> set[Function]:
        """Functions that were given up before, and ran in eager: others are parts of what calls them by now."""
        if self._seen is None:
            return self._given_up
        called = {(c.co_filename, c.co_firstlineno, c.co_name) for c in self._ran}
        return self._given_up & called

    def graph_breaks(self) -> list[torch_private.GraphBreak]:
        """Those that calls met which were watched, and those noted since; without a watch, all that are new.

        So for other threads, which are not watched.
        """
        if self._seen is None:
            return new_breaks(self._before)
        before, mine = set(map(id, self._before)), threading.get_ident()
        met = [
            each
            for each in self._seen
            if id(each) in self._met or (id(each) not in before and each.thread != mine)
        ]
        return met + new_breaks(self._seen)


class _Identities:
    """Code objects by identity: two of the same source are equal."""

    def __init__(self, by_id: Mapping[int, types.CodeType]) -> None:
        self._by_id = by_id

    def __contains__(self, code: object) -> bool:
        return id(code) in self._by_id


def new_breaks(before: Sequence[torch_private.GraphBreak]) -> list[torch_private.GraphBreak]:
    """Graph breaks that were met since others were all."""
    known = set(map(id, before))
    return [each for each in torch_private.graph_breaks() if id(each) not in known]


def _since_reset(notes: Sequence[Any]) -> Sequence[Any]:
    """The newest of some notes of compilations: those since `torch.compiler.reset()`, which numbers functions anew."""
    newest: dict[str, int] = {}
    for i in range(len(notes) - 1, -1, -1):
        frame, _, number = str(notes[i].compile_id).rpartition("/")
        if notes[i].co_name is None or not (frame and number.isdecimal()):
            continue
        _, _, of_frame = frame.rpartition("/")
        if of_frame.isdecimal() and int(of_frame) >= torch_private.frames_compiled():
            return notes[i + 1 :]
        if frame in newest and int(number) >= newest[frame]:
            return notes[i + 1 :]
        newest[frame] = int(number)
    return notes


def _last(notes: Iterable[Any]) -> dict[Function, Any]:
    """The last compilation of each function."""
    functions: dict[str, Function] = {}
    last: dict[Function, Any] = {}
    for each in notes:
        frame = torch_private.function_of(each.compile_id)
        if each.co_name is not None:
            functions[frame] = each.co_filename, each.co_firstlineno, each.co_name
        elif not _is_at_limit(each):  # a backward's
            continue
        last[functions.get(frame, (frame,))] = each
    return last


def codes_of(values: Iterable[Any]) -> list[types.CodeType]:
    """Of the functions and methods among some values."""
    found = (getattr(getattr(value, "__func__", value), "__code__", None) for value in values)
    return [code for code in found if isinstance(code, types.CodeType)]


def _is_of(function: Function, code: types.CodeType) -> bool:
    """Whether a function is that of some code, or what is left of it behind a graph break."""
    if len(function) == 1:
        return False
    file, line, name = function
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    return (file, function_name(name)) == (code.co_filename, code.co_name) and (
        code.co_firstlineno <= line <= last
    )


def _is_at_limit(compilation: Any) -> bool:
    return _AT_LIMIT in (compilation.fail_reason or "")


def _described(function: Function, compilation: Any) -> EagerFunction:
    place = None
    if len(function) > 1:
        file, line, name = function
        place = f"{os.path.basename(file)}:{line} in {function_name(name)}"
        if file.endswith(WRAPPER):
            place = "modules of torch's own classes, as nn.Sequential (they count as one function)"
    found = _at_limit(compilation) if _is_at_limit(compilation) else _broken(compilation)
    reason = ReasonReport(
        code=found.code, op=found.op, detail=found.detail, fix=found.fix, line=found.line
    )
    return EagerFunction(place=place, reason=reason)


def _broken(compilation: Any) -> Reason:
    file, line = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
    return given_up(compilation.fail_reason or compilation.fail_type, _line(file, line))


def _line(file: str | None, number: int | None) -> str | None:
    """The user's line, `model.py:41 in forward: code`."""
    if not file or number is None:
        return None
    place = f"{os.path.basename(file)}:{number}"
    name = _function_at(file, number)
    code = linecache.getline(file, number).strip()
    return f"{place}{f' in {name}' if name else ''}{f': {code}' if code else ''}"


def _function_at(file: str, line: int) -> str | None:
    """The innermost function that a line is in."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno).name if around else None


def _at_limit(compilation: Any) -> Reason:
    limit = _LIMIT.search(compilation.fail_reason)
    option, times = limit.groups() if limit else ("recompile_limit", "so many")
    cause, line, hint = _cause(compilation.recompile_reason or "")
    why = f"; the guard that failed last: {cause}" if cause else ""
    usual = OTHER_FIXES["recompile_limit"]
    if cause.startswith(_OTHER_BACKEND):
        why, usual = ", the last time since backend or options were others", OTHER_OPTIONS
    often = f"{times} times, as often as torch._dynamo.config.{option} allows"
    detail = f"it was compiled {often}{why}. Calls that fit nothing compiled run in eager"
    return Reason("recompile_limit", "", detail, ways([*([hint] if hint else []), usual]), line)


def _cause(text: str) -> tuple[str, str | None, str | None]:
    """Of a recompilation: what changed, the user's line that needs it, and torch's hint.

    Source: torch/_dynamo/guards.py `get_guard_fail_reason_helper`, 2.11 to 2.15.
    """
    first = _VERSION.sub("", next(iter(text.splitlines()), ""))
    hint = _HINT.search(first)
    first = _HINT.sub("", first).strip()
    source = _SOURCE.match(first)
    found = None if hint is None else hint.group(1).rstrip(".")
    if source is None:
        return first.partition("  # ")[0].strip(), None, found
    guard, code, file, line, name = source.groups()
    place = f"{os.path.basename(file)}:{line} in {name}"
    return guard, f"{place}: {code}" if code else place, found
