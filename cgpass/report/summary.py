"""`summary`: what this process compiled, in a few lines."""

import os

from cgpass import telemetry, torch_private
from cgpass.compile.facts.breaks import untold
from cgpass.compile.facts.lines import function_name
from cgpass.report import frames
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
    places = [graph.place for graph in graphs]
    functions = set(map(_function_at, places))
    noted = [
        each
        for each in torch_private.graph_breaks()
        if not each.earlier or _function_of(each) in functions
    ]
    found = untold(noted, [end.line for end in ends], places)
    lines = [
        f"graph break at {each.line}: {each.detail}"
        if each.rest is None
        else f"{why_left(each.rest, each)}: {each.detail}"
        for each in found
        if each.rest is None or each.rest not in known
    ]
    lines += [
        f"{why_left(each.place, each.reason)}: {each.reason.detail} [{each.reason.code}]; {each.reason.fix}"
        for each in frames.at_limit()
    ]
    parts = [telemetry.graphs_summary(), *lines]
    parts += [telemetry.steps_summary(), telemetry.by_hand_summary()]
    text = "\n".join(filter(None, parts))
    if not text:
        return "no graph was compiled"
    status = native.loader.status
    return text if status is None else f"{text}\nnative code: {status}"


def _function_at(place: str | None) -> str:
    """Of `model.py:41 in forward`, the file and the name; modules of torch's own are one function."""
    where, _, name = (place or "").partition(" in ")
    return f"{where.rpartition(':')[0]} in {name}" if name else "module"


def _function_of(noted: torch_private.GraphBreak) -> str:
    file, name = noted.function
    if file.endswith(frames.WRAPPER):
        return "module"
    return f"{os.path.basename(file)} in {function_name(name)}"
