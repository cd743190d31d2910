"""`summary`: what this process compiled, in a few lines."""

from cgpass import telemetry, torch_private
from cgpass.report import eager
from cgpass.runtime import native
from cgpass.telemetry.reason import many


def summary() -> str:
    """What this process compiled, or compiled or called since `cgpass.reset()`, a few lines for each graph.

    Partitions captured and eager, and why; very old graphs are only counted. Below each graph, the graph break it ends
    at, and partitions some of whose calls ran without a graph or warmed up again and again, and why. Then graph breaks
    that no graph ends at, modules of torch's that one left to eager, and functions that reached torch's limit on
    compilations; others that `torch.compile` gave up as a whole are named by `explain` alone. Then training steps and
    what `make_graphed_callables` returned, as long as they live, and how they were called. Last, whether the native
    code is in use, unless nothing was to be recorded.
    """
    older, listed = telemetry.summarised()
    lines = [many(older, "older graph")] if older else []
    for graph, runs in listed:
        lines.append(str(graph))
        if graph.graph_break is not None and graph.direction != "backward":
            lines.append(f"  {graph.graph_break.ending}")
        parts = {name: part for run in runs for name, part in run.parts.items()}
        lines += [f"  {name}: {why}" for name, part in parts.items() for why in part.reasons]
    graphs = [graph for graph, _ in listed]
    told = {graph.graph_break for graph in graphs}
    earlier = {id(each) for each in torch_private.graph_breaks() if each.earlier}
    breaks, left = eager.graph_breaks(earlier, graphs)
    lines += [f"graph break at {each.line}: {each.detail}" for each in breaks if each not in told]
    rests = {each.rest for each in told if each is not None}
    lines += [f"{each.left}: {each.detail}" for each in left if each.rest not in rests]
    lines += [
        f"{each.left}: {each.detail} [{each.code}]; {each.fix}"
        for each in eager.left_to_eager(torch_private.compilations(), earlier="")
        if each.code == "recompile_limit"
    ]
    lines += [step.explain() for step in telemetry.steps()]
    lines += [by_hand(name, stats) for name, stats in telemetry.named_stats()]
    if not lines:
        return "no graph was compiled"
    status = native.loader.status
    return "\n".join(lines if status is None else [*lines, f"native code: {status}"])


def by_hand(name: str, stats: telemetry.CallStats) -> str:
    """How something that was graphed by hand was called."""
    return (
        f"{name}, graphed by hand: {many(stats.recordings, 'recording')}, {many(stats.calls, 'call')}, "
        f"{stats.plain_calls} of them without a graph"
    )
