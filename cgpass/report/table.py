"""Reports as text of at most 100 columns."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from cgpass.report.words import (
    NONE,
    NOTHING,
    UNKNOWN,
    alike,
    breaks,
    briefly,
    but_for,
    copied_bytes,
    in_graphs,
    left_out,
    listed,
    many,
    milliseconds,
    ratio,
    share,
    size,
    subject,
    unsettled,
    why_left,
)

if TYPE_CHECKING:
    from cgpass.report.model import (
        EagerFunction,
        FunctionReport,
        GraphReport,
        PartitionReport,
        ReasonReport,
        RecordingReport,
        Report,
    )

WIDTH: Final = 100
_SHOWN: Final = 6
"""Recordings of a partition that are all listed."""
_NAME: Final = 24
"""Width of the names of partitions; longer ones have a line of their own."""
_COLUMNS: Final = (
    ("runs", 6),
    ("ops", 6),
    ("kernels", 7),
    ("replays", 8),
    ("copied", 10),
    ("recorded", 8),
)
_TIMES: Final = (("ms", 8), ("plain ms", 8))
"""Columns where times are known."""


def text(report: "Report") -> str:
    """The report as text.

    Args:
        report: The report.
    """
    lines = [*_head(report)]
    for left in report.left_to_eager:
        lines += ["", *_left(left)]
    for found in report.graph_breaks:
        lines += ["", *_wrapped(f"graph break at {found.line}: {found.detail}", 0)]
        lines += _wrapped(f"fix: {found.fix}", 2)
    for function in report.functions:
        lines += ["", *_function(function)]
    if not report.functions and not report.left_to_eager and not report.graph_breaks:
        lines += ["", *_wrapped(NOTHING, 0)]
    return "\n".join(lines)


def _wrapped(words: str, indent: int, hanging: int = 2) -> list[str]:
    """Text in lines, all but the first of them indented further; at most half of a line is indentation."""
    return textwrap.wrap(
        " ".join(words.split()),
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )


def _head(report: "Report") -> Iterator[str]:
    versions = f"cgpass {report.cgpass}, torch {report.torch}, {report.device}"
    yield from _wrapped(versions, 0)
    if report.native is not None:
        yield from _wrapped(f"native code: {report.native}", 0)
    done, work = report.work
    if report.ms is not None and not done:
        yield from _wrapped(f"one call: {milliseconds(report.ms)} ms", 0)
    elif report.ms is not None:
        times = ratio(report.ms, report.plain_ms)
        than = f", {milliseconds(report.plain_ms)} ms without: {times}" if times else ""
        yield from _wrapped(f"one call: {milliseconds(report.ms)} ms with CUDA graphs{than}", 0)
    if work:
        line = f"in graphs{'' if report.settled else ' if it settled'}: {share(done, work)} {in_graphs(report)}"
        if report.gpu_share is not None:
            line += f", {share(report.gpu_share, 1)} of the call's GPU time"
        yield from _wrapped(line, 0)
    outside = breaks(report.all_graph_breaks, report.counted)
    if work and outside:
        yield from _wrapped(outside, 0)
    left = left_out(report.left_to_eager, report.counted)
    if work and left:
        yield from _wrapped(left, 0)
    if not report.settled:
        yield from _wrapped(f"it did not settle: {unsettled(report)}", 0)


def _left(function: "EagerFunction") -> Iterator[str]:
    reason = function.reason
    yield from _wrapped(why_left(function.place, reason), 0)
    yield from _wrapped(f"{reason.detail} [{reason.code}]", 2)
    yield from _wrapped(f"fix: {reason.fix}", 2)


def _function(function: "FunctionReport") -> Iterator[str]:
    place = function.place or UNKNOWN
    yield from _wrapped(f"function {function.number}: {place}{but_for(function)}", 0)
    if function.pool_bytes is not None:
        yield from _wrapped(f"its graphs' memory pools: {size(function.pool_bytes)}", 2)
    for graph in function.graphs:
        yield from _graph(graph)
    reason = function.graph_break
    if reason is not None and reason.rest is not None:
        yield from _wrapped(f"{reason.rest} is left to eager, see above", 2)
    elif reason is not None:
        place = f" at {reason.line}" if reason.line else ""
        yield from _wrapped(f"ends at a graph break{place}: {reason.detail}", 2)
        yield from _wrapped(f"fix: {reason.fix}", 4)


def _graph(graph: "GraphReport") -> Iterator[str]:
    head = f"{graph.direction}: "
    if graph.skip is not None:
        head += f"runs without CUDA graphs, {many(graph.num_ops, 'operator')}"
    else:
        captured = sum(part.captured for part in graph.partitions)
        head += (
            f"{captured} of {many(len(graph.partitions), 'partition')} captured, "
            f"{share(graph.captured_ops, graph.num_ops)} of {many(graph.num_ops, 'operator')}"
        )
    head += f", {many(graph.calls, 'call')}"
    if graph.calls_per_run is not None and graph.calls_per_run != 1:
        head += f", {graph.calls_per_run:g} in each call of what was explained"
    if graph.ms is not None:
        head += f", {milliseconds(graph.ms)} ms"
        head += "" if graph.plain_ms is None else f" (plain {milliseconds(graph.plain_ms)})"
    yield from _wrapped(head, 2)
    if graph.skip is not None:
        yield from _skip(graph)
    else:
        yield from _rows(graph.partitions)
        for part in graph.partitions:
            yield from _details(part)


def _skip(graph: "GraphReport") -> Iterator[str]:
    if graph.reasons:
        yield from _reasons(graph.reasons, 4)
    else:
        yield from _wrapped(f"why: {graph.skip}", 4)


def _rows(parts: Sequence["PartitionReport"]) -> Iterator[str]:
    timed = any(part.ms is not None for part in parts)
    yield _row("partition", [title for title, _ in (*_COLUMNS, *(_TIMES if timed else ()))])
    for part in parts:
        name = " ".join(part.name.split())
        if len(name) > _NAME:
            yield from _wrapped(name, 4)
            name = ""
        times = [milliseconds(part.ms), milliseconds(part.plain_ms)] if timed else []
        yield _row(name, [*_cells(part), *times])


def _row(name: str, cells: Iterable[str]) -> str:
    """One line; a number too wide for its column takes the room of those before it, as far as there is."""
    line = f"    {name:{_NAME}}"
    edge = len(line)
    for cell, (_, width) in zip(cells, (*_COLUMNS, *_TIMES), strict=False):
        edge += width + 1
        line += cell.rjust(max(len(cell) + 1, edge - len(line)))
    return line[:WIDTH].rstrip()


def _cells(part: "PartitionReport") -> list[str]:
    if not part.captured:
        kernels = NONE if part.kernels is None else str(part.kernels)
        return [
            "plain",
            str(part.num_ops),
            kernels,
            *[NONE] * 3,
        ]
    return [
        "graph",
        str(part.num_ops),
        NONE if part.kernels is None else str(part.kernels),
        str(part.counts.get("replays", 0)),
        size(copied_bytes(part)),
        str(part.counts.get("recordings", len(part.recordings))),
    ]


def _details(part: "PartitionReport") -> Iterator[str]:
    lines: list[str] = []
    if part.reasons:
        lines += _reasons(part.reasons, 6)
    if part.copied_inputs:
        copied = [f"{each.name} ({size(each.num_bytes)})" for each in part.copied_inputs]
        lines += _wrapped(f"copies in every replay: {listed(copied)}", 6)
    lines += _memory(part)
    lines += _recordings(part)
    if lines:
        yield from _wrapped(f"{part.name}:", 4)
        yield from lines


def _memory(part: "PartitionReport") -> Iterator[str]:
    """Where its inputs and outputs lie, and what happened to them."""
    if not part.captured:
        return
    facts = []
    if part.static_inputs:
        count = many(part.static_inputs, "static input")
        facts.append(f"reads {count} in place (parameters, buffers, marked ones)")
    if part.output_bytes:
        facts.append(f"outputs {size(part.output_bytes)}")
    rescues, moved = part.counts.get("rescues", 0), part.counts.get("rescued_bytes", 0)
    if rescues:
        facts.append(
            f"outputs still referenced were copied {many(rescues, 'time')} ({size(moved)})"
        )
    warmups = part.counts.get("warmups", 0)
    if warmups > part.counts.get("replays", 0):
        facts.append(many(warmups, "warm-up call"))
    plain = part.counts.get("plain_calls", 0)
    if plain:
        facts.append(f"{many(plain, 'call')} without a graph")
    if facts:
        yield from _wrapped("; ".join(facts), 6)


def _recordings(part: "PartitionReport") -> Iterator[str]:
    """The first and the last ones; of those between how many have which cause."""
    made = part.counts.get("recordings", len(part.recordings))
    left = made - len(part.recordings)
    if left > 0:
        yield from _wrapped(f"{many(left, 'older recording')}", 6)
    numbered = list(enumerate(part.recordings, left + 1))
    first, last = (numbered, []) if len(numbered) <= _SHOWN else (numbered[:3], numbered[-2:])
    for number, each in first:
        yield from _recording(number, each)
    if last:
        between = numbered[3:-2]
        causes = Counter(each.cause for _, each in between)
        counts = ", ".join(
            f"{cause} {many(count, 'time')}" for cause, count in causes.most_common()
        )
        yield from _wrapped(f"recordings {between[0][0]} to {between[-1][0]}: {counts}", 6)
    for number, each in last:
        yield from _recording(number, each)


def _recording(number: int, each: "RecordingReport") -> list[str]:
    facts = [] if each.record_ms is None else [f"{milliseconds(each.record_ms)} ms"]
    if each.instantiate_ms is not None:
        facts.append(f"instantiate {milliseconds(each.instantiate_ms)}")
    if each.warm_up_ms is not None:
        facts.append(f"warm-up {milliseconds(each.warm_up_ms)}")
    if each.pool:
        facts.append(f"pool {each.pool}")
    told = f" ({', '.join(facts)})" if facts else ""
    return _wrapped(f"recording {number}{told}: {each.cause}: {each.detail}", 6)


def _reasons(reasons: Sequence["ReasonReport"], indent: int) -> list[str]:
    lines: list[str] = []
    for reason, *others in alike(reasons):
        place = f" at {reason.line}" if reason.line else ""
        times = f" ({reason.count} times)" if reason.count > 1 else ""
        lines += _wrapped(f"{subject(reason)}{place}{times}", indent)
        lines += _wrapped(f"{reason.detail} [{reason.code}]", indent + 2)
        lines += _wrapped(f"fix: {reason.fix}", indent + 2)
        if others:
            lines += _wrapped(
                f"the same holds for {listed([*map(briefly, others)], 12)}", indent + 2
            )
    return lines
