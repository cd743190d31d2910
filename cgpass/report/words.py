"""Numbers as reports show them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from cgpass.telemetry.reason import Reason, many

if TYPE_CHECKING:
    from cgpass.report.model import (
        EagerFunction,
        FunctionReport,
        PartitionReport,
        ReasonReport,
        Report,
    )

NONE = "-"
"""Stands for what is not known or does not apply."""
UNKNOWN = "a function without a line of its own"
NOTHING = (
    "Nothing here was compiled by cgpass. Either it is already compiled for another backend (pass the original module to "
    "explain), or torch.compile gave up on it earlier in this process (call torch.compiler.reset())."
)
"""Stands for functions where there are none."""

_WITHOUT_OPERATOR: Final = {
    "capture": "capture failed",
    "out_of_memory": "capture failed",
    "no_placeholder": "capture failed",
    "graph_break": "a graph break",
    "recompile_limit": "the limit on compilations",
}
"""What reasons are said of that blame no operator, by code."""


def size(num_bytes: int | None) -> str:
    """Bytes with a unit, `1.2 MiB`."""
    if num_bytes is None:
        return NONE
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(amount, 1) >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def milliseconds(ms: float | None) -> str:
    """A time without its unit, with as many digits as mean something."""
    if ms is None:
        return NONE
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def share(part: float, whole: float) -> str:
    """A percentage that says 100% only of everything, and 0% only of nothing."""
    if not whole:
        return NONE
    percent = 100 * part / whole
    shown = f"{percent:.1f}"
    if part < whole and shown == "100.0":
        return "99.9%"
    if part and shown == "0.0":
        return "0.1%"
    return f"{shown.removesuffix('.0')}%"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many are left."""
    left = len(names) - limit
    return ", ".join(names[:limit]) + (f", and {left} more" if left > 0 else "")


def ratio(ms: float | None, plain_ms: float | None) -> str | None:
    """How much of the time graphs take, None where nobody knows."""
    return None if ms is None or not plain_ms else f"graphs take {ms / plain_ms:.2f}x the time"


def alike(reasons: Iterable["ReasonReport"]) -> list[list["ReasonReport"]]:
    """Reasons that say the same of several operators, together; in order of the first of each."""
    groups: dict[tuple[str, ...], list[ReasonReport]] = {}
    for reason in reasons:
        groups.setdefault((reason.code, reason.detail, reason.fix), []).append(reason)
    return list(groups.values())


def subject(reason: "ReasonReport") -> str:
    """What a reason is said of: an operator, or all of a partition."""
    if reason.op:
        return reason.op
    return _WITHOUT_OPERATOR.get(reason.code, "some calls")


def briefly(reason: "ReasonReport") -> str:
    """Operator and place of one of several that are alike, `aten.mm.default (model.py:9, 4 times)`."""
    place = [] if reason.line is None else [reason.line.partition(" in ")[0]]
    times = [f"{reason.count} times"] if reason.count > 1 else []
    where = ", ".join(place + times)
    return f"{subject(reason)}{f' ({where})' if where else ''}"


def breaks(found: Iterable["ReasonReport | Reason"], counted: str) -> str | None:
    """What percentages leave out where functions end at graph breaks; None where none does.

    Args:
        found: The graph breaks.
        counted: What the percentages are of, "kernels" or "operators".
    """
    at = _lines(found)
    if not at:
        return None
    return (
        f"graph breaks at {many(len(at), 'line')} ({listed(at)}): what runs there, outside of compiled functions, is "
        f"not among these {counted}"
    )


def only_breaks(found: Iterable["ReasonReport | Reason"]) -> str | None:
    """What is said where nothing but graph breaks was met; None if there is none."""
    at = _lines(found)
    return f"graph breaks at {many(len(at), 'line')} ({listed(at)})" if at else None


def _lines(found: Iterable["ReasonReport | Reason"]) -> list[str]:
    lines = dict.fromkeys(
        reason.line or "no known line"
        for reason in found
        if reason.rest is None  # else it stands among what was left to eager
    )
    return sorted((line.partition(" in ")[0] for line in lines), key=_by_number)


def _by_number(place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def left_out(found: Sequence["EagerFunction"], counted: str) -> str | None:
    """What percentages leave out where functions were left to eager; None where none was.

    Args:
        found: These functions.
        counted: What the percentages are of, "kernels" or "operators".
    """
    if not found:
        return None
    places = listed([*dict.fromkeys(each.place or UNKNOWN for each in found)])
    return f"left to eager: {places}; what that runs itself is not among these {counted}"


def why_left(place: str | None, reason: "ReasonReport | Reason") -> str:
    """Which function was left to eager, and because of which line."""
    because = f", because of {reason.line}" if reason.line else ""
    return f"left to eager: {place or UNKNOWN}{because}"


def but_for(function: "FunctionReport") -> str:
    """What the figures of a function leave out of it, to stand behind its name."""
    found = function.graph_break
    return f", but for {found.rest}" if found is not None and found.rest is not None else ""


def copied_bytes(part: "PartitionReport") -> int | None:
    """What each replay of a partition copies, of the newest recording that is or was; None where there was none."""
    if not part.live_recordings and not part.copied_inputs:
        return part.recordings[-1].copied_bytes if part.recordings else None
    return sum(each.num_bytes for each in part.copied_inputs)


def in_graphs(report: "Report") -> str:
    """What the share of work in CUDA graphs is a share of."""
    amount = many(report.work[1], report.counted.removesuffix("s"))
    if report.of_all_calls:
        return f"of the {amount} that {ran(in_eager=bool(report.left_to_eager))}"
    return f"of the {amount} of compiled {'code' if report.left_to_eager else 'functions'}"


def ran(*, in_eager: bool) -> str:
    """What is counted of all calls; where parts of functions are left to eager, not what functions ran."""
    which = "code ran after its" if in_eager else "functions ran after their"
    return f"compiled {which} warm-ups"


def unsettled(report: "Report") -> str:
    """What the calls of captured partitions did that went on recording or compiling."""
    counts = [part.counts for graph in report.graphs for part in graph.partitions if part.captured]
    calls, replays, warmups = (
        sum(each.get(name, 0) for each in counts) for name in ("calls", "replays", "warmups")
    )
    what = "calls went on recording or compiling"
    if calls:
        what += (
            f"; of {many(calls, 'call')} of partitions, {replays} replayed and {warmups} warmed up"
        )
    parts = [part for graph in report.graphs for part in graph.partitions if part.captured]
    causes = report.left_to_eager or any(part.reasons or len(part.recordings) > 1 for part in parts)
    return f"{what}; see the causes below" if causes else what
