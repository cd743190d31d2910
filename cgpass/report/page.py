"""Reports as one page of HTML that needs nothing else: no network, no script."""

import html as escapes
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cgpass.report.style import CSS
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


def html(report: "Report") -> str:
    """The report as one page, for browsers in light and in dark.

    Args:
        report: The report.
    """
    left = [*map(_left, report.left_to_eager), *_graph_breaks(report)]
    body = "\n".join([*_head(report), *left, *map(_function, report.functions)])
    if not report.functions and not left:
        body += f"<section><p>{NOTHING}</p></section>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>cgpass report</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _e(text: object) -> str:
    """Text with everything escaped that means something in HTML."""
    return escapes.escape(str(text))


def _code(text: object) -> str:
    return f"<code>{_e(text)}</code>"


def _paragraph(inner: str, kind: str = "soft") -> str:
    return f'<p class="{kind}">{inner}</p>'


# ---- all of it


def _head(report: "Report") -> Iterator[str]:
    versions = f"cgpass {report.cgpass}, torch {report.torch}, {report.device}"
    if report.native is not None:
        versions += f"; native code: {report.native}"
    yield f"<h1>CUDA graph coverage</h1>{_paragraph(_e(versions))}"
    if not report.settled:
        yield _paragraph(_e(f"It did not settle: {unsettled(report)}."), "warn")
    yield f'<div class="tiles">{"".join(_tiles(report))}</div>'
    outside = breaks(report.all_graph_breaks, report.counted)
    if report.work[1] and outside:
        yield _paragraph(_e(f"{outside}."), "warn")
    left = left_out(report.left_to_eager, report.counted)
    if report.work[1] and left:
        yield _paragraph(_e(f"{left[0].upper()}{left[1:]}."), "warn")
    yield _paragraph(
        '<span class="key graph"></span>in a CUDA graph<span class="key plain"></span>runs without a graph'
    )


def _tiles(report: "Report") -> Iterator[str]:
    done, work = report.work
    if report.ms is not None:
        what = "one call with CUDA graphs" if done else "one call"
        yield _tile(f"{milliseconds(report.ms)} ms", what)
    times = ratio(report.ms, report.plain_ms)
    if done and times is not None:
        yield _tile(f"{milliseconds(report.plain_ms)} ms", f"without: {times}")
    if work:
        when = "" if report.settled else " if it settled"
        yield _tile(
            share(done, work),
            f"{in_graphs(report)} in graphs{when}",
        )
    if report.ms is None and report.partitions:
        captured = [part for part in report.partitions if part.captured]
        yield _tile(f"{len(captured)} of {len(report.partitions)}", "partitions captured")
        made = sum(part.counts.get("recordings", len(part.recordings)) for part in captured)
        yield _tile(str(made), "recordings made")
    if report.gpu_share is not None:
        yield _tile(share(report.gpu_share, 1), "of the call's GPU time in graphs")
    pools = [f.pool_bytes for f in report.functions if f.pool_bytes is not None]
    if pools:
        yield _tile(size(sum(pools)), "memory pools of the graphs")
    copied = sum(
        (1 if graph.calls_per_run is None else graph.calls_per_run) * each.num_bytes
        for graph in report.graphs
        for part in graph.partitions
        for each in part.copied_inputs
    )
    yield _tile(size(round(copied)), "copied into graphs in each call")


def _tile(number: str, what: str) -> str:
    return f'<div class="tile"><b>{_e(number)}</b><span class="soft">{_e(what)}</span></div>'


def _left(function: "EagerFunction") -> str:
    place = UNKNOWN.capitalize() if function.place is None else _code(function.place)
    return (
        f"<section><h2>{place}</h2>{_paragraph('left to eager because of')}"
        f"{_reason([function.reason])}</section>"
    )


def _graph_breaks(report: "Report") -> Iterator[str]:
    if report.graph_breaks:
        listing = "".join(_reason([each]) for each in report.graph_breaks)
        yield f"<section><h2>Graph breaks at which no function ends</h2>{listing}</section>"


def _function(function: "FunctionReport") -> str:
    place = UNKNOWN.capitalize() if function.place is None else _code(function.place)
    lines = [f"<section><h2>{place}{_e(but_for(function))}</h2>"]
    facts = [f"function {function.number}", f"driver {function.driver or 'none'}"]
    if function.pool_bytes is not None:
        facts.append(f"memory pools {size(function.pool_bytes)}")
    lines.append(_paragraph(_e(", ".join(facts))))
    lines += map(_graph, function.graphs)
    found = function.graph_break
    if found is not None and found.rest is not None:
        lines.append(_paragraph(_e(f"{found.rest} is left to eager, see above"), "warn"))
    elif found is not None:
        lines += ["<h3>It ends at a graph break</h3>", _reason([found])]
    return "\n".join([*lines, "</section>"])


# ---- a graph


def _graph(graph: "GraphReport") -> str:
    calls = many(graph.calls, "call")
    if graph.calls_per_run is not None and graph.calls_per_run != 1:
        calls += f", {graph.calls_per_run:g} in each call of what was explained"
    head = f'<h3>{_e(graph.direction)} <span class="soft">{_e(calls)}</span></h3>'
    if graph.skip is not None:
        why = "".join(map(_reason, alike(graph.reasons))) or _paragraph(_e(graph.skip), "reason")
        ops = many(graph.num_ops, "operator")
        return f"{head}{_paragraph(_e(f'All of it runs without a graph, {ops}.'))}{why}"
    parts = "".join(map(_details, graph.partitions))
    return f"{head}{_bars(graph)}{_rows(graph.partitions)}{parts}"


def _bars(graph: "GraphReport") -> str:
    """A timeline with CUDA graphs and one without, on one scale; by operators where no times are known."""
    parts = graph.partitions
    with_graphs = [part.ms for part in parts]
    plain = [part.plain_ms for part in parts]
    scale = max(_total(with_graphs), _total(plain))
    if not scale:
        ops = [float(part.num_ops) for part in parts]
        bars = _bar("operators", parts, ops, max(sum(ops), 1.0), many(graph.num_ops, "operator"))
    else:
        bars = _bar("with graphs", parts, with_graphs, scale, f"{milliseconds(graph.ms)} ms")
        if _total(plain):
            bars += _bar("without", parts, plain, scale, f"{milliseconds(graph.plain_ms)} ms")
    return f'<div class="bars">{bars}</div>'


def _total(amounts: Iterable[float | None]) -> float:
    return sum(amount or 0.0 for amount in amounts)


def _bar(
    title: str,
    parts: Sequence["PartitionReport"],
    amounts: Sequence[float | None],
    scale: float,
    total: str,
) -> str:
    pieces = []
    for part, value in zip(parts, amounts, strict=True):
        kind = "graph" if part.captured and title != "without" else "plain"
        number = (
            f"{milliseconds(value)} ms" if title != "operators" else many(part.num_ops, "operator")
        )
        pieces.append(
            f'<i class="{kind}" style="flex-grow:{max(value or 0.0, 1e-4):.4f}" '
            f'title="{_e(part.name)}: {_e(number)}">{_e(part.name)}</i>'
        )
    width = max(1.0, 100 * _total(amounts) / scale)
    return (
        f'<span>{_e(title)}</span><div><div class="bar" style="width:{width:.2f}%">'
        f"{''.join(pieces)}</div></div><span>{_e(total)}</span>"
    )


_TITLES = ("partition", "runs", "ops", "kernels", "replays", "copied", "recorded")


def _rows(parts: Sequence["PartitionReport"]) -> str:
    timed = any(part.ms is not None for part in parts)
    titles = (*_TITLES, *(("ms", "plain ms") if timed else ()))
    head = "".join(f"<th>{_e(title)}</th>" for title in titles)
    rows = "".join(_row(part, timed=timed) for part in parts)
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _row(part: "PartitionReport", *, timed: bool) -> str:
    cells = [
        "graph" if part.captured else "plain",
        part.num_ops,
        NONE if part.kernels is None else part.kernels,
        part.counts.get("replays", 0) if part.captured else NONE,
        size(copied_bytes(part)) if part.captured else NONE,
        part.counts.get("recordings", len(part.recordings)) if part.captured else NONE,
        *((milliseconds(part.ms), milliseconds(part.plain_ms)) if timed else ()),
    ]
    return f"<tr><td>{_code(part.name)}</td>{''.join(f'<td>{_e(c)}</td>' for c in cells)}</tr>"


# ---- a partition


def _details(part: "PartitionReport") -> str:
    reasons = "".join(map(_reason, alike(part.reasons)))
    if not part.captured:
        return (
            f"{_paragraph(f'{_code(part.name)} runs without a graph:')}{reasons}" if reasons else ""
        )
    inner = "".join([_inputs(part), _memory(part), _recordings(part)])
    if not inner:
        return reasons
    return (
        f"{reasons}<details><summary>{_code(part.name)}: inputs, memory, recordings</summary>"
        f"<div>{inner}</div></details>"
    )


def _inputs(part: "PartitionReport") -> str:
    found = ""
    if part.copied_inputs:
        rows = "".join(
            f'<tr><td class="words">{_code(each.name)}</td><td>{_e(size(each.num_bytes))}</td>'
            f'<td class="words">{_code(each.line) if each.line else NONE}</td></tr>'
            for each in part.copied_inputs
        )
        found += (
            '<div class="scroll"><table><tr><th>copied in every replay</th><th>size</th>'
            f'<th class="words">first read at</th></tr>{rows}</table></div>'
        )
    return found


def _memory(part: "PartitionReport") -> str:
    facts = []
    if part.static_inputs:
        facts.append(f"{many(part.static_inputs, 'static input')} read in place")
    if part.output_bytes:
        facts.append(f"outputs {size(part.output_bytes)}")
    told = [
        ("rescues", "copied outputs that were still referenced"),
        ("plain_calls", "ran without a graph"),
    ]
    if part.counts.get("warmups", 0) > part.counts.get("replays", 0):
        told.append(("warmups", "warmed up"))
    for name, what in told:
        if part.counts.get(name):
            facts.append(f"{what} in {many(part.counts[name], 'call')}")
    return _paragraph(_e("; ".join(facts))) if facts else ""


def _recordings(part: "PartitionReport") -> str:
    if not part.recordings:
        return ""
    timed = any(each.record_ms is not None for each in part.recordings)
    times = "<th>warm-up ms</th><th>record ms</th><th>instantiate ms</th>" if timed else ""
    rows = "".join(
        f"<tr><td>{_e(each.cause)}</td>{_times(each) if timed else ''}"
        f'<td>{_e(size(each.copied_bytes))}</td><td>{_e(each.pool)}</td><td class="words">{_e(each.detail)}</td></tr>'
        for each in part.recordings
    )
    return (
        f'<div class="scroll"><table><tr><th>recorded for</th>{times}<th>copies</th>'
        f'<th>pool</th><th class="words">what was new</th></tr>{rows}</table></div>'
    )


def _times(recording: "RecordingReport") -> str:
    found = recording.warm_up_ms, recording.record_ms, recording.instantiate_ms
    return "".join(f"<td>{_e(milliseconds(ms))}</td>" for ms in found)


def _reason(reasons: Sequence["ReasonReport"]) -> str:
    """One reason, and what else has it."""
    reason, *others = reasons
    what = _code(reason.op) if reason.op else _e(subject(reason))
    place = f" at {_code(reason.line)}" if reason.line else ""
    times = f" ({reason.count} times)" if reason.count > 1 else ""
    head = f"{what}{place}{times}".strip()
    same = f"<br>The same holds for {_e(listed([*map(briefly, others)], 12))}." if others else ""
    return (
        f'<div class="reason">{head}<br>{_e(reason.detail)} '
        f'<span class="soft">[{_e(reason.code)}]</span><br>'
        f'<span class="fix">{_e(reason.fix)}</span>{same}</div>'
    )
