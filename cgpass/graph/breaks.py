"""Where Dynamo ended a graph before the function's end."""

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from cgpass import _torch
from cgpass.graph.lines import function_name
from cgpass.reason import Reason, ways

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
    "This graph break is fundamental",
)
"""Hints that are none to users."""
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
_IN_A_BLOCK: Final = "what is from there on is in a block (try:, with) that has a graph break"


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Why Dynamo ended a graph where it did; None if the function ends there, too.

    Args:
        gm: As the backend is given it.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    stack = list(getattr(found, "user_stack", None) or ())
    frame = stack[-1] if stack else None
    text = str(found.reason)
    if text == _STEP:
        return _cut_short(frame)
    word = text.partition(" ")[0]
    reason = reason_of(text, _line(frame))
    if word in _WORDS:
        reason = Reason("graph_break", "", *_WORDS[word], _line(frame))
    unseen = _left_without_a_graph(frame)  # taken in any case: no other graph is to tell of it
    called = _left_by_torch(stack) or unseen
    return reason if called is None else replace(reason, fix=ways([reason.fix, _LOOP]), rest=called)


def _left_by_torch(stack: Sequence[Any]) -> str | None:
    """Which of torch's own modules lies between a graph's function and a break in what it called: it runs in eager.

    Dynamo compiles functions of users by themselves where those that call them run in eager, but none of torch's.
    """
    frames = [each for each in stack if each.filename != _CALLS_HOOKS]
    for caller, frame in itertools.pairwise(frames):
        if _is_of_torchs_modules(frame.filename):
            name = f"torch/nn/modules/{os.path.basename(frame.filename)}"
            if caller.filename.startswith(os.path.dirname(torch.__file__) + os.sep):
                return f"what {name} runs besides"
            place = f"{os.path.basename(caller.filename)}:{caller.lineno}"
            return f"what {name} runs, called at {place} in {function_name(caller.name)}"
    return None


def _left_without_a_graph(frame: Any) -> str | None:
    """As `_left_by_torch`, where nothing lies before the call, so that no graph of what called it reaches a backend."""
    if frame is None:
        return None
    found = _torch.take_graph_break(
        lambda each: (
            len(each.stack) > 1
            and _is_place_of(each.stack[-1], frame)
            and _left_by_torch(each.stack) is not None
        )
    )
    return None if found is None else _left_by_torch(found.stack)


def _is_place_of(line: Any, frame: Any) -> bool:
    return (line.filename, line.lineno) == (frame.filename, frame.lineno)


def _is_of_torchs_modules(filename: str) -> bool:
    directory, _ = os.path.split(filename)
    return directory == os.path.dirname(torch.nn.modules.__file__)


def reason_of(text: str, line: str | None) -> Reason:
    """A graph break as torch tells of it.

    Args:
        text: Its message; where it led to others, one after the other.
        line: The user's.

    Source: torch/_dynamo/exc.py, `format_graph_break_message`, `augment_exc_message`, 2.11 to 2.15.
    """
    blocks = [block.strip().splitlines() for block in _LED_TO.split(text)]
    titles = [block[0] for block in blocks if block] or ["a graph break"]
    said = [each.strip() for block in blocks for each in block]
    hints = [each.removeprefix("Hint: ") for each in said if each.startswith("Hint: ")]
    hints = [hint for hint in hints if not any(each in hint for each in _NO_HELP)]
    return Reason("graph_break", "", "; ".join(dict.fromkeys(titles)), ways(hints or [_SEE]), line)


def given_up(text: str, line: str | None, rest: str | None = None) -> Reason:
    """A graph break that Dynamo can't go on behind.

    Args:
        text: Its message.
        line: The user's.
        rest: What of a function is left to eager, if not all of it.
    """
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
    found = _torch.newest_graph_break()
    if found is None or found.function != (frame.filename, frame.name):
        return given_up(_IN_A_BLOCK, _line(frame), rest)
    return given_up(found.text, _line(found.line or frame), rest)


def _line(frame: Any) -> str | None:
    if frame is None:
        return None
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {function_name(frame.name)}"
    return f"{place}: {frame.line}" if frame.line else place
