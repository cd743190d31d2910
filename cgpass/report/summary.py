"""`summary`: what this process compiled, in a few lines."""

from cgpass import _torch, telemetry
from cgpass.report.collect import snapshot
from cgpass.report.outside import with_outside
from cgpass.report.words import why_left


def summary() -> str:
    """Every graph compiled in this process: partitions captured and eager, and why. Very old ones are only counted.

    Below each graph, the graph break it ends at, and partitions some of whose calls ran without a graph or warmed up
    again and again, and why. Then graph breaks that no graph ends at, and modules of torch's that one left to eager;
    functions that `torch.compile` gave up as a whole are named by `explain` alone. Then what
    `make_graphed_callables` returned, as long as it lives, and how it was called.
    """
    ends = {
        reason.rest
        for graph, _ in telemetry.graph_runs().values()
        if (reason := graph.graph_break) is not None
    }
    report = with_outside(snapshot(), (), _torch.graph_breaks())
    lines = [
        f"{why_left(left.place, left.reason)}: {left.reason.detail}"
        for left in report.left_to_eager
        if left.place not in ends
    ]
    lines += [f"graph break at {found.line}: {found.detail}" for found in report.graph_breaks]
    parts = [telemetry.graphs_summary(), *lines, telemetry.by_hand_summary()]
    return "\n".join(filter(None, parts)) or "no graph was compiled"
