"""Where Dynamo ended a graph before the function's end."""

import itertools
import os
import re
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import op_tables
from cgpass.compile.facts.lines import function_name
from cgpass.telemetry.reason import Reason, ways

_SEE: Final = "TORCH_LOGS=graph_breaks shows more"
_CALLED: Final = (
    "put what can be compiled into functions of its own: those that a function in eager calls are compiled by "
    "themselves"
)
_LED_TO: Final = re.compile(r"^\*\*\* While handling this graph break.*$", re.MULTILINE)
_NO_HELP: Final = (
    "report an issue",
    "file an issue",
    "caused by an earlier graph break",
    "this graph break is fundamental",
)
"""Hints that are none to users."""
_OPERATOR: Final = re.compile(r"(?<=Operator )`aten\.(\w+)\.\w+`")
"""What torch names of operators that read data, or whose result's size depends on it."""
_STEP: Final = "step_unsupported"
"""What torch says where it compiles what is before a line and leaves all from there on to eager."""
_WORDS: Final = {
    "generic_jump": (
        "a branch on a tensor's value",
        "choose between both results on the device: torch.where, or torch.cond for more than that",
    ),
    "comprehension_graph_break": (
        "a graph break in a comprehension",
        f"take what breaks the graph out of the comprehension, or write a loop in a function of its own; {_SEE}",
    ),
}
"""What torch has an internal word for instead of a message, and what to do.

Source: torch/_dynamo/symbolic_convert.py, comprehension_graph_break.py, calls of `GraphCompileReason`, 2.11 to 2.15.
"""
_LOOP: Final = "loop over a torch.nn.ModuleList in a forward of your own instead of calling a container of torch's"
_CALLS_HOOKS: Final = os.path.join(os.path.dirname(torch.nn.modules.__file__), "module.py")
"""What lies between any two modules."""
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_PYTHON: Final = sysconfig.get_path("stdlib") + os.sep
_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_INSTALLED: Final = re.compile(r"[/\\](site|dist)-packages[/\\]")
_LEAVE_IT: Final = {
    "Unsupported Tensor.backward() call": "leave it: the backward has graphs of its own",
    "`Optimizer.zero_grad`": "leave it: it launches little",
}
"""What a training step has anyway, as torch tells of it, and what to do."""
_IN_A_BLOCK: Final = "what is from there on is in a block (try:, with) that has a graph break"


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Return why Dynamo ended a graph where it did; None if the function ends there, too.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    stack = list(getattr(found, "user_stack", None) or ())
    text = str(found.reason)
    if text == _STEP:
        return _cut_short(stack[-1] if stack else None)
    newest = _newest()
    if newest is not None and stack and newest.line and _is_place_of(newest.line, stack[-1]):
        newest.told = True
    word = text.partition(" ")[0]
    reason = _of_stack(text, stack)
    if word in _WORDS:
        reason = Reason("graph_break", "", *_WORDS[word], reason.line)
    unseen = _left_without_a_graph(stack)  # told of in any case: no other graph is to do it
    rest = _left_by_torch(stack) or unseen
    if rest is not None:
        return _leaves(reason, rest)
    return replace(reason, detail=reason.detail + _reached(stack))


def untold(
    noted: Iterable[torch_private.GraphBreak],
    told: Iterable[str | None],
    places: Iterable[str | None],
) -> list[Reason]:
    """Return graph breaks that no graph tells of: nothing was before them in the function that has them.

    Libraries that run in eager anyway, as what logs or shows progress, have breaks of their own: they are left out.
    `told` are lines that others name, `places` where functions begin that were compiled.
    """
    known = {place_of(line) for line in told}
    files = {place_of(place).rpartition(":")[0] for place in places}
    found: dict[Any, Reason] = {}
    for each in noted:
        users = (frame.filename for frame in each.stack if _is_users(frame))
        rest = _left_by_torch(each.stack)
        matters = rest is not None or any(
            _INSTALLED.search(name) is None or os.path.basename(name) in files for name in users
        )
        if each.told or not each.stack or not matters:
            continue
        reason = _leaves(_of_stack(each.text, each.stack), rest)
        found.setdefault((place_of(reason.line), rest), reason)
    known |= {place for place, rest in found if rest is not None}
    return [
        reason for (place, rest), reason in found.items() if rest is not None or place not in known
    ]


def place_of(line: str | None) -> str:
    """Of a line, `model.py:41`."""
    return (line or "").partition(" in ")[0].partition(": ")[0]


def _of_stack(text: str, stack: Sequence[Any]) -> Reason:
    """A graph break, by the innermost line that isn't torch's, if there is one."""
    last: Any = stack[-1] if stack else None
    frame = next(filter(_is_users, reversed(stack)), last)
    reason = reason_of(text, _line(frame))
    inside = "" if frame is last else f", in {_library_file(last.filename)}:{last.lineno}"
    fix = next((fix for said, fix in _LEAVE_IT.items() if said in text), reason.fix)
    if inside and "torch._dynamo.graph_break()" in text:
        fix = "leave it: torch compiles what is called there by itself"
    return replace(reason, detail=f"{reason.detail}{inside}", fix=fix)


def _reached(stack: Sequence[Any]) -> str:
    """From which of the user's lines a break was reached, if it is in what that calls."""
    users = [each for each in stack if _is_users(each)]
    if len(users) < 2:
        return ""
    caller = users[0]
    return f", reached from {os.path.basename(caller.filename)}:{caller.lineno} in {function_name(caller.name)}"


def _is_users(frame: Any) -> bool:
    """Tell if a frame is neither torch's, nor ours, nor Python's own."""
    file = frame.filename
    if file.startswith((_TORCH, _OURS)):
        return False
    return not file.startswith(_PYTHON) or _INSTALLED.search(file) is not None


def _library_file(filename: str) -> str:
    """`torch/optim/optimizer.py`, `logging/__init__.py`."""
    if filename.startswith(_TORCH):
        filename = f"torch{os.sep}{filename.removeprefix(_TORCH)}"
    return filename.removeprefix(_PYTHON).replace(os.sep, "/")


def _leaves(reason: Reason, rest: str | None) -> Reason:
    """A graph break, with what of torch's own code it left to eager."""
    return reason if rest is None else replace(reason, fix=ways([reason.fix, _LOOP]), rest=rest)


def _left_by_torch(stack: Sequence[Any]) -> str | None:
    """Return which of torch's own modules lies between a graph's function and a break in what it called: it runs in eager.

    Dynamo compiles functions of users by themselves where those that call them run in eager, but none of torch's.
    """
    frames = [each for each in stack if each.filename != _CALLS_HOOKS]
    for caller, frame in itertools.pairwise(frames):
        if os.path.dirname(frame.filename) == os.path.dirname(_CALLS_HOOKS):
            name = _library_file(frame.filename)
            if caller.filename.startswith(_TORCH):
                return f"what {name} runs besides"
            place = f"{os.path.basename(caller.filename)}:{caller.lineno}"
            return f"what {name} runs, called at {place} in {function_name(caller.name)}"
    return None


def _left_without_a_graph(stack: Sequence[Any]) -> str | None:
    """As `_left_by_torch`, where nothing lies before the call, so that no graph of what called it reaches a backend."""
    if not stack:
        return None
    thread = threading.get_ident()
    for each in reversed(torch_private.graph_breaks()):
        if (
            not each.told
            and each.thread == thread
            and len(each.stack) > 1
            and _is_place_of(each.stack[-1], stack[-1])
            and (rest := _left_by_torch(each.stack)) is not None
        ):
            each.told = True
            return rest
    return None


def _is_place_of(line: Any, frame: Any) -> bool:
    return (line.filename, line.lineno) == (frame.filename, frame.lineno)


def reason_of(text: str, line: str | None) -> Reason:
    """Return a graph break as torch tells of it; where it led to others, `text` has one after the other.

    Source: torch/_dynamo/exc.py, `format_graph_break_message`, `augment_exc_message`, 2.11 to 2.15.
    """
    blocks = [block.strip().splitlines() for block in _LED_TO.split(text)]
    titles = [block[0] for block in blocks if block] or ["a graph break"]
    said = [each.strip() for block in blocks for each in block]
    hints = [each.removeprefix("Hint: ") for each in said if each.startswith("Hint: ")]
    hints = [hint for hint in hints if not any(each in hint.lower() for each in _NO_HELP)]
    detail = "; ".join(dict.fromkeys(titles))
    operator = _OPERATOR.search(text)
    if operator is not None:
        detail = f"{detail}: {operator[0].strip('`')}"
        known = op_tables.OPERATOR_FIXES.get(operator[1])
        hints = hints if known is None else [known, *hints]
    elif "Tensor.item()" in text:
        hints.insert(0, op_tables.FIXES["host_read"])
    return Reason("graph_break", "", detail, ways(hints or [_SEE]), line)


def given_up(text: str, line: str | None, rest: str | None = None) -> Reason:
    """Return a graph break that Dynamo can't go on behind; `rest` is left to eager, all of the function if None."""
    reason = reason_of(text, line)
    detail = f"torch.compile can't go on behind this graph break: {reason.detail}"
    return Reason(reason.code, "", detail, ways([reason.fix, _CALLED]), line, rest)


def _cut_short(frame: Any) -> Reason:
    """Of a graph that ends at a line, since a break further on is in a block that Dynamo can't go on in.

    Source: torch/_dynamo/symbolic_convert.py `InstructionTranslatorBase.step`, `step_graph_break`, 2.11 to 2.15.
    """
    if frame is None:
        return given_up(_IN_A_BLOCK, None, "the rest of a function")
    name = function_name(frame.name)
    rest = f"the rest of {name} from {os.path.basename(frame.filename)}:{frame.lineno} on"
    found = _newest()
    if found is None or found.function != (frame.filename, frame.name):
        return given_up(_IN_A_BLOCK, _line(frame), rest)
    found.told = True
    return given_up(found.text, _line(found.line or frame), rest)


def _newest() -> torch_private.GraphBreak | None:
    """Of this thread."""
    thread = threading.get_ident()
    return next(
        (each for each in reversed(torch_private.graph_breaks()) if each.thread == thread), None
    )


def _line(frame: Any) -> str | None:
    if frame is None:
        return None
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {function_name(frame.name)}"
    return f"{place}: {frame.line}" if frame.line else place
