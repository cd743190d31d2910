"""`summary`: what this process compiled, in a few lines."""

from cgpass import _torch, telemetry
from cgpass.graph.breaks import untold
from cgpass.report.frames import at_limit
from cgpass.report.words import why_left
from cgpass.runtime import native


def summary() -> str:
    """What this process compiled, or compiled or called since `cgpass.reset()`, a few lines for each graph.

    Partitions captured and eager, and why; very old graphs are only counted. Below each graph, the graph break it ends
    at, and partitions some of whose calls ran without a graph or warmed up again and again, and why. Then graph breaks
    that no graph ends at, modules of torch's that one left to eager, and functions that reached torch's limit on
    compilations; others that `torch.compile` gave up as a whole are named by `explain` alone. Then what
    `make_graphed_callables` returned, as long as it lives, and how it was called. Last, whether the native code is in
    use, unless nothing was to be recorded.
    """
    graphs = [graph for graph, _ in telemetry.summarised()]
    ends = [graph.graph_break for graph in graphs if graph.graph_break is not None]
    known = {reason.rest for reason in ends}
    found = untold(
        _torch.graph_breaks(), [end.line for end in ends], [graph.place for graph in graphs]
    )
    lines = [
        f"graph break at {each.line}: {each.detail}"
        if each.rest is None
        else f"{why_left(each.rest, each)}: {each.detail}"
        for each in found
        if each.rest is None or each.rest not in known
    ]
    lines += [
        f"{why_left(each.place, each.reason)}: {each.reason.detail} [{each.reason.code}]; {each.reason.fix}"
        for each in at_limit()
    ]
    parts = [telemetry.graphs_summary(), *lines, telemetry.by_hand_summary()]
    text = "\n".join(filter(None, parts))
    if not text:
        return "no graph was compiled"
    status = native.loader.status
    return text if status is None else f"{text}\nnative code: {status}"
