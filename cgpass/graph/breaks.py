"""Where Dynamo ended a graph before the function's end."""

import os
from typing import Any, Final

from torch import fx

from cgpass.reason import Reason

_SEE: Final = "TORCH_LOGS=graph_breaks shows more"


def graph_break_of(gm: fx.GraphModule) -> Reason | None:
    """Why Dynamo ended a graph where it did; None if the function ends there, too.

    Args:
        gm: As the backend is given it.

    Source: torch/_dynamo/output_graph.py, `GraphCompileReason`, set on every graph, 2.11 to 2.15.
    """
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    first, *others = str(found.reason).splitlines() or ["a graph break"]
    hints = [line.strip().removeprefix("Hint: ") for line in others if "Hint: " in line]
    hints = [hint for hint in hints if "report an issue" not in hint]
    return Reason("graph_break", "", first, " Or: ".join(hints) or _SEE, _line(found))


def _line(found: Any) -> str | None:
    stack = list(getattr(found, "user_stack", None) or ())
    if not stack:
        return None
    frame = stack[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"{place}: {frame.line}" if frame.line else place
