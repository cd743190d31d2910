"""Graph breaks, where Dynamo ended a graph before the function's end: line, cause and remedy."""

import itertools
import os
import re
import sysconfig
import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import op_tables
from cgpass.compile.facts.lines import function_name
from cgpass.telemetry.reason import Reason

_HOST_READ: Final = op_tables.FIXES["host_read"]
_LEAVE_IT: Final = "leave it: torch compiles what is called there by itself"
_KNOWN: Final = (
    (r"Tensor\.backward\(\) call", "the backward is called", "leave it: it has its own graphs"),
    (r"`Optimizer\.zero_grad`", "gradients are cleared", "leave it: it launches little"),
    (r"Tensor\.item\(\)|_local_scalar_dense", "the host reads a tensor's value", _HOST_READ),
    (r"tolist\(\)", "the host reads a tensor's values", _HOST_READ),
    (
        r"generic_jump|Data-dependent branching",
        "a branch on a tensor's value",
        "choose between both results on the device: torch.where, or torch.cond for more than that",
    ),
    (
        r"builtin operator `print`",
        "print can't be traced",
        "print after the compiled function, or torch._dynamo.config.reorderable_logging_functions.add(print)",
    ),
    (
        r"logging\.Logger|[Ll]ogger",
        "a logger's method can't be traced",
        "log outside of the compiled function, or add the method to torch._dynamo.config.ignore_logging_functions",
    ),
    (r"torch\._dynamo\.graph_break\(\)", "torch._dynamo.graph_break() is called", "remove it"),
    (
        "comprehension_graph_break",
        "a graph break in a comprehension",
        "take what breaks the graph out of the comprehension",
    ),
)
"""Torch's words, what they mean, and what to do.

Source: torch/_dynamo/graph_break_registry.json, `GraphCompileReason`, 2.11 to 2.15.
"""
_NO_HELP: Final = re.compile("an issue|caused by an earlier graph break|graph break is fundamental")
"""Hints that are none to users."""
_SEE: Final = "TORCH_LOGS=graph_breaks shows more"
_CALLED: Final = "or put what can be compiled into functions of its own"
_LOOP: Final = "or loop over an nn.ModuleList in a forward of your own: torch compiles none of its own containers alone"
_OPERATOR: Final = re.compile(r"(?<=Operator )`(aten\.(\w+)\.\w+)`")
_STEP: Final = "step_unsupported"
"""What torch says where it compiles what is before a line and leaves all from there on to eager."""
_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_MODULES: Final = os.path.dirname(torch.nn.modules.__file__)
_PYTHON: Final = sysconfig.get_path("stdlib") + os.sep
_OURS: Final = str(Path(__file__).parents[2]) + os.sep
_INSTALLED: Final = re.compile(r"[/\\](site|dist)-packages[/\\]")
_LENGTH: Final = 160
"""Of the words of torch's own that are shown."""


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Find out why Dynamo ended a graph where it did; None if the function ends there, too.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    stack = list(getattr(found, "user_stack", None) or ())
    if str(found.reason) == _STEP:
        return _cut_short(stack[-1] if stack else None)
    return _of_stack(str(found.reason), stack)


def untold(
    noted: Iterable[torch_private.GraphBreak],
    earlier: Container[torch_private.GraphBreak],
    told: Iterable[str | None],
    places: Iterable[str | None],
) -> list[Reason]:
    """List graph breaks that no graph tells of: nothing was before them in the function that has them.

    Libraries that run in eager anyway, as what logs or shows progress, have breaks of their own: they are left out.
    `told` are lines that others name, `places` where functions begin that were compiled.
    """
    known = {place_of(line) for line in told}
    files = {place_of(place).rpartition(":")[0] for place in places}
    found: dict[Any, Reason] = {}
    for each in noted:
        users = [frame.filename for frame in each.stack if _is_users(frame)]
        mine = (not _INSTALLED.search(f) or os.path.basename(f) in files for f in users)
        reason = replace(_of_stack(each.text, each.stack), is_earlier=each in earlier)
        if reason.rest is not None or any(mine):
            found.setdefault((place_of(reason.line), reason.rest), reason)
    known |= {place for place, rest in found if rest is not None}
    return [
        reason for (place, rest), reason in found.items() if rest is not None or place not in known
    ]


def place_of(line: str | None) -> str:
    """Of a line, `model.py:41`."""
    return (line or "").partition(" in ")[0].partition(": ")[0]


def reason_of(text: str, line: str | None) -> Reason:
    """A graph break as torch tells of it, in a cause and one remedy.

    Source: torch/_dynamo/exc.py, `format_graph_break_message`, `augment_exc_message`, 2.11 to 2.15.
    """
    lines = [each.strip() for each in text.strip().splitlines()]
    detail = next(filter(None, lines), "torch says no more").partition(". ")[0][:_LENGTH]
    hints = [each.removeprefix("Hint: ") for each in lines if each.startswith("Hint: ")]
    fix = next((hint for hint in hints if not _NO_HELP.search(hint)), _SEE)
    fix = fix.partition(". ")[0][:_LENGTH]
    known = ((cause, fix) for pattern, cause, fix in _KNOWN if re.search(pattern, text))
    detail, fix = next(known, (detail, fix))
    operator = _OPERATOR.search(text)
    if operator is not None and operator[2] in op_tables.OPERATOR_FIXES:
        detail = f"{operator[1]} reads data, or makes a size that depends on it"
        fix = op_tables.OPERATOR_FIXES[operator[2]]
    in_loop = ", in a loop" if "graph break in loop" in text else ""
    return Reason("graph_break", "", f"graph break: {detail}{in_loop}", fix, line)


def given_up(text: str, line: str | None, rest: str | None = None) -> Reason:
    """A graph break that Dynamo can't go on behind, so that `rest` is left to eager."""
    reason = reason_of(text, line)
    return replace(reason, fix=f"{reason.fix}; {_CALLED}", rest=rest)


def _of_stack(text: str, stack: Sequence[Any]) -> Reason:
    """A graph break, by the innermost line that isn't torch's, if there is one."""
    last: Any = stack[-1] if stack else None
    users = [each for each in stack if _is_users(each)]
    frame = users[-1] if users else last
    reason = reason_of(text, _line(frame))
    detail, fix, rest = reason.detail, reason.fix, _left_by_torch(stack)
    if frame is not last:
        detail += f", in {_library_file(last.filename)}:{last.lineno}"
        fix = _LEAVE_IT if "torch._dynamo.graph_break()" in text else fix
    elif len(users) > 1:
        detail += f", reached from {_place(users[0])}"
    return replace(reason, detail=detail, fix=fix if rest is None else f"{fix}; {_LOOP}", rest=rest)


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


def _left_by_torch(stack: Sequence[Any]) -> str | None:
    """Name torch's own module between a graph's function and a break in what it called: it runs in eager.

    Dynamo compiles functions of users by themselves where those that call them run in eager, but none of torch's.
    """
    between = os.path.join(_MODULES, "module.py")  # lies between any two modules
    frames = [each for each in stack if each.filename != between]
    for caller, frame in itertools.pairwise(frames):
        if os.path.dirname(frame.filename) == _MODULES:
            name = _library_file(frame.filename)
            if caller.filename.startswith(_TORCH):
                return f"what {name} runs besides"
            return f"what {name} runs, called at {_place(caller)}"
    return None


def _cut_short(frame: Any) -> Reason:
    """Of a graph that ends at a line, since a break further on is in a block that Dynamo can't go on in.

    Source: torch/_dynamo/symbolic_convert.py `InstructionTranslatorBase.step`, `step_graph_break`, 2.11 to 2.15.
    """
    text, rest = "a block (try:, with) has a graph break", "the rest of a function"
    if frame is None:
        return given_up(text, None, rest)
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    rest = f"the rest of {function_name(frame.name)} from {place} on"
    mine = threading.get_ident()
    noted = [each for each in torch_private.graph_breaks() if each.thread == mine]
    found = noted[-1] if noted else None
    if found is None or found.function != (frame.filename, frame.name):
        return given_up(text, _line(frame), rest)
    return given_up(found.text, _line(found.line or frame), rest)


def _place(frame: Any) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {function_name(frame.name)}"


def _line(frame: Any) -> str | None:
    if frame is None:
        return None
    return f"{_place(frame)}: {frame.line}" if frame.line else _place(frame)
