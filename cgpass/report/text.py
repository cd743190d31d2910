"""Writes reports: the headline, what costs most, and all of it as text of at most 100 columns."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from cgpass.report.model import Facts, GraphReport, PartitionReport
from cgpass.runtime.inputs import listed
from cgpass.telemetry.reason import KEEP_GRADIENTS, OTHER_FIXES, Reason, many

WIDTH: Final = 100
_LISTED: Final = 12
"""Findings that the text lists, and operators or inputs that one of them names."""
_ROW: Final = "    {:24} {:>6} {:>6} {:>8} {:>8} {:>10} {:>8} {:>12}"
"""Of the table of partitions."""
NOTHING: Final = (
    "Nothing that cgpass compiled ran here. It was not called, has no operators, has full backward hooks, is compiled for another backend, is "
    "under torch.compiler.disable, is a container of torch's own (nn.Sequential) inside DistributedDataParallel or FSDP, or "
    "torch.compile gave up on it earlier in this process (torch.compiler.reset() makes it try again)."
)
UNCOUNTED: Final = "what runs in eager at a graph break, or is left to it, is not counted; compiled functions that it calls are"
_DROP: Final = "drop results before their backward and the next call, and call zero_grad() before that; if you need them, leave it"
EARLIER: Final = "noted before this report: "


# ---- numbers


def size(num_bytes: int | None) -> str:
    """Bytes with a unit, `1.2 MiB`."""
    if num_bytes is None or num_bytes < 1024:
        return "-" if num_bytes is None else f"{num_bytes} B"
    amount, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while round(amount, 1) >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.1f} {units[0]}"


def milliseconds(ms: float | None) -> str:
    """A time with as many digits as mean something."""
    return "-" if ms is None else f"{ms:.{3 if ms < 10 else 1}f} ms"


def share(part: float, whole: float) -> str:
    """A percentage that says 100% only of everything, and 0% only of nothing."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    shown = min(max(percent, 0.1), 99.9) if 0 < part < whole else percent
    return f"{f'{shown:.1f}'.removesuffix('.0')}%"


def wrapped(words: str, indent: int = 0, hanging: int = 2) -> list[str]:
    """Text in lines of at most 100 columns, all but the first of them indented further."""
    return textwrap.wrap(
        " ".join(words.split()),
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )


# ---- the headline


def headline(report: Facts) -> str:
    """Say in one line how much ran in graphs."""
    done, work = report.work
    if not report.made:
        return "the block is still running: its report is ready when it ends"
    if report.graphs_ms is not None and report.device_ms:
        inside = f"{share(report.graphs_ms, report.device_ms)} of the device time was inside graphs"
    elif work:
        inside = (
            f"{share(done, work)} of the {many(work, 'operator')} of compiled code ran in graphs"
        )
    elif report.graphs and not (report.left_to_eager or report.others):
        inside = "only warm-up calls ran: call it more often, with the same sizes"
        if report.recompilations:
            inside = "only warm-up calls ran: functions were compiled once more (see below)"
        if not any(part.captured for part in report.partitions):
            inside = "there was nothing to record: what was compiled launches no work"
    elif report.graph_breaks or report.left_to_eager:
        inside = "nothing ran in graphs"
        if report.others and report.counters.get("replays"):
            inside += ", but for training steps or callables graphed by hand (see below)"
    elif report.others:
        inside = "only training steps or callables graphed by hand ran (see below)"
    else:
        return NOTHING
    boundaries = "1 boundary" if report.boundaries == 1 else f"{report.boundaries} boundaries"
    return f"{inside}, {boundaries}, {many(report.plain_calls, 'call')} without a graph"


def facts(report: Facts) -> Iterator[str]:
    """Lines below the headline."""
    native = "" if report.native is None else f", native code {report.native}"
    yield f"cgpass {report.cgpass}, torch {report.torch}, {report.device}{native}"
    if report.ms and report.plain_ms is not None:
        ratio = report.plain_ms / report.ms
        yield (
            f"a call takes {milliseconds(report.ms)} with graphs, {milliseconds(report.plain_ms)} without "
            f"({ratio:.2f} times as long)"
        )
    if report.steps:
        yield f"{report.whole_steps} of {many(report.steps, 'training step')} after first ones and warm-ups were one graph (see the end)"
    grown = report.counters
    if report.graphs:
        yield (
            f"{many(grown.get('recordings', 0), 'recording')} made, {many(grown.get('replays', 0), 'replay')}, "
            f"{many(grown.get('warmups', 0), 'warm-up')}, {size(grown.get('copied_bytes', 0))} copied"
        )
    if report.pool_bytes is not None:
        yield f"{size(report.pool_bytes)} in the memory pools of graphs"


# ---- what costs most


def findings(report: Facts) -> list[Reason]:
    """List the causes of lost time, largest first, those to leave as they are last. One cause at one line is one entry.

    Each names its place as its line, and the operators to blame.
    """
    found: dict[object, list[tuple[float, Reason]]] = {}
    for weight, each in _found(report):
        key = (each.line, each.code, each.fix, not each.op and each.detail)
        found.setdefault(key, []).append((weight, each))
    joined = []
    for alike in found.values():
        ops = [each.op for _, each in alike if each.op]
        count = sum(each.count for _, each in alike)
        reason = replace(alike[0][1], op=listed([*dict.fromkeys(ops)], _LISTED), count=count)
        joined.append((sum(weight for weight, _ in alike), reason))
    joined.sort(key=lambda pair: (pair[1].fix.startswith("leave it"), -pair[0]))
    return [each for _, each in joined]


def _found(report: Facts) -> Iterator[tuple[float, Reason]]:
    """Each thing that costs time, and how many operators ran without a graph for it: infinite where nobody counted."""
    for reason in (*report.left_to_eager, *report.graph_breaks, *report.recompilations):
        detail = f"{EARLIER if reason.is_earlier else ''}{reason.detail}"
        where = reason.line
        if reason.rest is not None:
            where = f"{reason.rest} runs in eager{f' because of {where}' if where else ''}"
        yield math.inf, replace(reason, line=where, detail=detail)
    for graph in report.graphs:
        weight = graph.calls * graph.num_ops
        yield from ((weight, replace(r, line=r.line or graph.name)) for r in graph.why)
        if graph.skip is not None and not graph.why:
            why, _, fix = graph.skip.partition("; ")
            yield weight, Reason("", "", f"it runs without CUDA graphs: {why}", fix, graph.name)
        for part in graph.partitions:
            where, lost = f"{graph.name}, {part.name}", (part.calls - part.replays) * part.num_ops
            for reason in part.reasons:
                yield lost or part.calls, replace(reason, line=reason.line or where)
            yield from events(where, part)


def events(where: str, part: PartitionReport) -> Iterator[tuple[float, Reason]]:
    """Yield what costs time though graphs run: inputs that moved, more recordings, results that are held."""
    for each in (each for each in part.copied_inputs if each.moved):
        name = f"{each.name} ({size(each.num_bytes)})"
        why, line = "moved, so each call that finds it at a new place copies it", each.line or where
        fix = KEEP_GRADIENTS if each.name.endswith(".grad") else OTHER_FIXES["new_tensor"]
        yield 1, Reason("moved", name, why, fix, line, count=0)
    trains = not where.startswith("inference")
    drop = _DROP if trains else "drop results before the next call, if you can"
    causes = Counter(note.cause for note in part.recordings if note.cause != "first")
    for cause, count in causes.items():
        notes = [note for note in part.recordings if note.cause == cause]
        least = "at least " if len(part.recordings) < part.counts.get("recordings", 0) else ""
        details = list(dict.fromkeys(note.detail for note in reversed(notes)))
        more = f"{least}{many(count, 'recording')}: {listed(details, 3)}"
        of_grads = cause == "moved" and ".grad (" in more
        fix = KEEP_GRADIENTS if of_grads else _CAUSES.get(cause, drop)
        yield count, _at(notes[-1].line, where, cause, more, fix)
    if rescues := part.counts.get("rescues", 0):
        copied = size(part.counts.get("rescued_bytes", 0))
        held = f"outputs still referenced were copied {many(rescues, 'time')} ({copied})"
        yield 0, _at(part.returned_at, where, "rescues", held, drop)  # cheap beside a recording


def _at(line: str | None, where: str, code: str, detail: str, fix: str) -> Reason:
    """A reason at the user's line, if that is known, that names the partition, too."""
    return Reason(code, "", f"{where}: {detail}" if line else detail, fix, line or where)


_CAUSES: Final = {
    "shape": OTHER_FIXES["new_shape"],
    "moved": OTHER_FIXES["new_tensor"],
    "other tensors": "leave it if several modules share code; otherwise write into tensors in place (copy_)",
    **dict.fromkeys(("memory", "anew"), "leave it, unless it keeps happening"),
}
"""Remedies for one more recording, by its cause."""


def what(reason: Reason) -> str:
    """Operators, cause and code."""
    cause = f"{reason.op}: {reason.detail}" if reason.op else reason.detail
    return f"{cause} [{reason.code}]" if reason.code else cause


# ---- all of it


def text(report: Facts) -> str:
    """The report as text."""
    if not report.made:
        return headline(report)
    lines = wrapped(headline(report))
    for each in facts(report):
        lines += wrapped(each)
    lines += costs(report)
    for place, graphs in by_function(report.graphs):
        lines += ["", *wrapped(place)]
        for graph in graphs:
            lines += [*wrapped(head(graph), 2), *table(graph)]
    return "\n".join([*lines, *others(report)])


def others(report: Facts) -> Iterator[str]:
    """Yield lines on training steps and callables graphed by hand."""
    for other in report.others:
        yield ""
        for each in other.splitlines():
            yield from wrapped(each, len(each) - len(each.lstrip()))


def costs(report: Facts) -> list[str]:
    """Lines on what costs most: place, cause and remedy of each; none where nothing does."""
    if not (found := findings(report)):
        return []
    lines = ["", "What costs most:"]
    for number, each in enumerate(found[:_LISTED], 1):
        times = f" ({each.count} times)" if each.count > 1 else ""
        if each.code == "graph_break":  # it says what is written there
            place = str(each.line).partition(": ")[0]
            lines += wrapped(f"{number}. {place}{times}: {what(each)}", 2, 3)
        else:
            lines += [*wrapped(f"{number}. {each.line}{times}", 2, 3), *wrapped(what(each), 5)]
        lines += wrapped(f"Do: {each.fix}", 5) if each.fix else []
    if (more := len(found) - _LISTED) > 0:
        lines += wrapped(f"and {more} more; report.save('report.json') keeps all", 2)
    return lines + (wrapped(UNCOUNTED, 2) if report.graph_breaks or report.left_to_eager else [])


def by_function(graphs: Iterable[GraphReport]) -> Iterator[tuple[str, list[GraphReport]]]:
    """Yield graphs by the compiled function that they belong to, and where that begins."""
    functions: dict[int | None, list[GraphReport]] = {}
    for graph in graphs:
        functions.setdefault(graph.function, []).append(graph)
    for each in functions.values():
        yield each[0].place or "a function whose line is unknown", each


def head(graph: GraphReport) -> str:
    """Direction and calls of a graph, and how much of it ran in CUDA graphs."""
    done, work = graph.work
    inside = f", {share(done, work)} of {many(work, 'operator')} in graphs" if work else ""
    return f"{graph.direction}: {many(graph.calls, 'call')}{inside}"


def table(graph: GraphReport) -> Iterator[str]:
    """Yield a row for each partition, and the facts about it, in lines."""
    timed = any(part.device_ms is not None for part in graph.partitions)
    titles = ("partition", "runs", "ops", "calls", "replays", "copied", "recorded")
    if graph.partitions:
        yield _ROW.format(*titles, "device/call" if timed else "").rstrip()
    for part in graph.partitions:
        copied = part.counts.get("copied_bytes", 0) // part.replays if part.replays else None
        counts = part.replays, size(copied), part.counts.get("recordings", 0)
        kind, more = ("graph", counts) if part.captured else ("plain", "---")
        took = milliseconds(part.device_ms) if timed else ""
        yield _ROW.format(part.name, kind, part.num_ops, part.calls, *more, took).rstrip()
        yield from wrapped("; ".join(_facts(part)), 6)


def _facts(part: PartitionReport) -> Iterator[str]:
    """Say where a captured partition's inputs and outputs lie."""
    if part.copied_inputs and part.replays:
        copied = [f"{each.name} ({size(each.num_bytes)})" for each in part.copied_inputs]
        total = sum(each.num_bytes for each in part.copied_inputs) * part.replays
        which = "every replay" if total == part.counts.get("copied_bytes") else "the last replay"
        yield f"copies {listed(copied, 5)} in {which}"
    if in_place := part.static_inputs - sum(each.moved for each in part.copied_inputs):
        yield f"reads {many(in_place, 'static input')} in place"
    if part.output_bytes:
        yield f"outputs {size(part.output_bytes)}"
    if warmups := part.counts.get("warmups", 0):
        yield many(warmups, "warm-up")
    if times := [each.record_ms for each in part.recordings if each.record_ms is not None]:
        yield f"a recording takes {milliseconds(sum(times) / len(times))}"
