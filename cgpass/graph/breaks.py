"""Where Dynamo ended a graph before the function's end."""

import os
import re
from typing import Any, Final

from torch import fx

from cgpass.reason import Reason

_SEE: Final = "TORCH_LOGS=graph_breaks shows more"
_LED_TO: Final = re.compile(r"^\*\*\* While handling this graph break.*$", re.MULTILINE)
_NO_HELP: Final = ("report an issue", "caused by an earlier graph break")
"""Hints that are none to users."""


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Why Dynamo ended a graph where it did; None if the function ends there, too.

    Args:
        gm: As the backend is given it.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    return reason_of(str(found.reason), _line(found))


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
    fix = " Or: ".join(dict.fromkeys(hints)) or _SEE
    return Reason("graph_break", "", "; ".join(dict.fromkeys(titles)), fix, line)


def _line(found: Any) -> str | None:
    stack = list(getattr(found, "user_stack", None) or ())
    if not stack:
        return None
    frame = stack[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {frame.line}" if frame.line else place
