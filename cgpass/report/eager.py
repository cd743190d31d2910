"""Reads in torch's own notes what `torch.compile` left to eager, and which graph breaks were met."""

import linecache
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from cgpass import telemetry, torch_private
from cgpass.compile.facts.breaks import given_up, place_of, untold
from cgpass.compile.facts.lines import function_name
from cgpass.telemetry.reason import OTHER_FIXES, OTHER_OPTIONS, Reason

_AT_LIMIT: Final = "recompile limit exceeded"
_LIMIT: Final = re.compile(r"exceeding the (\w+) .*currently set to (\d+)")
_VERSION: Final = re.compile(r"^\[?\d+/\d+\]?: ")
_HINT: Final = re.compile(r"\(HINT: .*\)\s*$")
_SETTING: Final = re.compile(r"torch\._dynamo\.config\.\w+ = \w+")
_SOURCE: Final = re.compile(r"^(.*?)\s+# (.*?)\s*# (\S+):(\d+) in (\S+)")
"""A guard, with the line that needs it."""
_OTHER_BACKEND: Final = "BACKEND_MATCH"
_WRAPPER: Final = os.path.join("torch", "_dynamo", "external_utils.py")
"""Holds the function as which Dynamo compiles modules of torch's. Source: `wrap_inline`, 2.11 to 2.15."""

Function = tuple[Any, ...]
"""File, first line and name; of a function that is not known, what torch numbers it."""


def graph_breaks(
    before: Collection[torch_private.GraphBreak], graphs: Sequence[telemetry.GraphSummary]
) -> tuple[list[Reason], list[Reason]]:
    """Graph breaks that were met, and those among them behind which torch left something to eager; each once.

    Those that graphs end at, those noted since `before`, and of earlier ones those of functions that ran.
    """
    ends = [graph.graph_break for graph in graphs if graph.graph_break is not None]
    functions = {_function_at(graph.place) for graph in graphs}
    noted = [
        each
        for each in torch_private.graph_breaks()
        if each not in before or (not each.over and _function_of(each) in functions)
    ]
    noted.sort(key=before.__contains__)
    others = untold(noted, before, [each.line for each in ends], [each.place for each in graphs])
    every: dict[Any, Reason] = {}
    for each in (*ends, *others):
        every.setdefault((place_of(each.line) or each, each.rest), each)
    left = [each for each in every.values() if each.rest is not None]
    return [each for each in every.values() if each.rest is None], left


def left_to_eager(before: Sequence[Any]) -> list[Reason]:
    """Functions whose last compilation was given up; of those noted `before` only what was compiled for our backend."""
    old, living = set(map(id, before)), _last(torch_private.compilations(since_reset=True))
    ours = {each.function for each in torch_private.graph_breaks() if not each.over}
    found = []
    for function, each in (_last(torch_private.compilations()) | living).items():
        is_old = id(each) in old
        is_ours = torch_private.is_ours(each) or (function[0], function[-1]) in ours
        counts = not is_old or (is_ours and len(function) > 1 and living.get(function) is each)
        if counts and torch_private.was_given_up(each):
            found.append(replace(_described(function, each), is_earlier=is_old))
    return found


def recompiled(before: Sequence[Any]) -> list[Reason]:
    """Why functions that cgpass compiles were compiled once more: the last cause at each line, and how often."""
    old, found = set(map(id, before)), dict[str, Reason]()
    for each in torch_private.compilations():
        text, is_new = each.recompile_reason, id(each) not in old and torch_private.is_ours(each)
        if text and is_new and each.co_name is not None and not torch_private.was_given_up(each):
            cause, line, _ = _cause(text)
            if cause.startswith(_OTHER_BACKEND):
                cause = "backend or options were others"
            line = line or _place((each.co_filename, each.co_firstlineno, each.co_name))
            count = found[line].count + 1 if line in found else 1
            detail, fix = f"compiled once more: {cause}", OTHER_FIXES["recompiled"]
            found[line] = Reason("recompiled", "", detail, fix, line, count=count)
    return list(found.values())


def _place(function: Function) -> str:
    if len(function) == 1:
        return "a function without a line of its own"
    file, line, name = function
    if file.endswith(_WRAPPER):
        return "modules of torch's own classes, as nn.Sequential (they count as one function)"
    return f"{os.path.basename(file)}:{line} in {function_name(name)}"


def _function_at(place: str | None) -> str:
    """Of `model.py:41 in forward`, the file and the name; modules of torch's own are one function."""
    where, _, name = (place or "").partition(" in ")
    return f"{where.rpartition(':')[0]} in {name}" if name else "module"


def _function_of(noted: torch_private.GraphBreak) -> str:
    file, name = noted.function
    is_torchs = file.endswith(_WRAPPER)
    return "module" if is_torchs else f"{os.path.basename(file)} in {function_name(name)}"


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


def _is_at_limit(compilation: Any) -> bool:
    return _AT_LIMIT in (compilation.fail_reason or "")


def _described(function: Function, compilation: Any) -> Reason:
    place = _place(function)
    if _is_at_limit(compilation):
        return _at_limit(compilation, place)
    file, number = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
    line = None
    if file and number is not None:
        code = linecache.getline(file, number).strip()
        line = f"{os.path.basename(file)}:{number}{f': {code}' if code else ''}"
    return given_up(compilation.fail_reason or compilation.fail_type, line, place)


def _at_limit(compilation: Any, rest: str) -> Reason:
    limit = _LIMIT.search(compilation.fail_reason)
    option, times = limit.groups() if limit else ("recompile_limit", "so many")
    cause, line, hint = _cause(compilation.recompile_reason or "")
    why = f"; the guard that failed last: {cause}" if cause else ""
    fix = OTHER_FIXES["recompile_limit"] + (f"; or set {hint[0]}" if hint else "")
    if cause.startswith(_OTHER_BACKEND):
        why, fix = ", the last time since backend or options were others", OTHER_OPTIONS
    often = f"{times} times, as often as torch._dynamo.config.{option} allows"
    detail = f"it was compiled {often}{why}. Calls that fit nothing compiled run in eager"
    return Reason("recompile_limit", "", detail, fix, line, rest)


def _cause(text: str) -> tuple[str, str | None, re.Match[str] | None]:
    """Of a recompilation: what changed, the user's line that needs it, and the setting that torch hints at.

    Source: torch/_dynamo/guards.py `get_guard_fail_reason_helper`, 2.11 to 2.15.
    """
    first = _VERSION.sub("", next(iter(text.splitlines()), ""))
    hint = _SETTING.search(first)
    first = _HINT.sub("", first).strip()
    source = _SOURCE.match(first)
    if source is None:
        return first.partition("  # ")[0].strip(), None, hint
    guard, code, file, line, name = source.groups()
    place = f"{os.path.basename(file)}:{line} in {name}"
    return guard, f"{place}: {code}" if code else place, hint
