"""`summary`: what this process compiled, in a few lines."""

from cgpass import _torch, telemetry
from cgpass.graph.breaks import untold
from cgpass.report.words import why_left
from cgpass.runtime import native


def summary() -> str:
    """Every graph compiled in this process: partitions captured and eager, and why. Very old ones are only counted.

    Below each graph, the graph break it ends at, and partitions some of whose calls ran without a graph or warmed up
    again and again, and why. Then graph breaks that no graph ends at, and modules of torch's that one left to eager;
    functions that `torch.compile` gave up as a whole are named by `explain` alone. Then what
    `make_graphed_callables` returned, as long as it lives, and how it was called. Last, whether the native code is in
    use, unless nothing was to be recorded.
    """
    graphs = [graph for graph, _ in telemetry.graph_runs().values()]
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
    parts = [telemetry.graphs_summary(), *lines, telemetry.by_hand_summary()]
    text = "\n".join(filter(None, parts))
    if not text:
        return "no graph was compiled"
    status = native.loader.status
    return text if status is None else f"{text}\nnative code: {status}"
