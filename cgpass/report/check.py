"""`python -m cgpass check`: runs a script, and says whether enough of its work was captured."""

import contextlib
import importlib.util
import os
import runpy
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cgpass import telemetry
from cgpass.errors import ReportError
from cgpass.report.model import EagerFunction, ReasonReport
from cgpass.report.ran import Ran, calls_of_parts
from cgpass.report.table import WIDTH
from cgpass.report.words import breaks, many, only_breaks, ran, share, why_left
from cgpass.telemetry.reason import NEW, OTHER_FIXES, Reason
from cgpass.telemetry.summaries import PartitionSummary

_FAILED = frozenset({"capture", "failed_capture", "no_placeholder", "out_of_memory", "syncs"})
"""Codes of what turned out not to be capturable only when it was captured."""


_MANY = 0.2
"""Share of calls from which on warm-ups are worth a word."""


@dataclass
class Work:
    """Operators that compiled functions ran, each counted as often as it ran, but for warm-ups."""

    total: int = 0
    captured: int = 0
    warmups: int = 0
    """Operators that warm-ups ran, besides."""
    graphs: int = 0
    plain: list[str] = field(default_factory=list)
    """What ran without graphs by design, and why."""
    graph_breaks: list[Reason | ReasonReport] = field(default_factory=list)
    """What ran there is not counted."""
    fell_back: list[str] = field(default_factory=list)
    """What was to be captured, and ran without a graph all the same."""
    in_eager: bool = False
    """Whether something of it was left to eager; it is not counted."""


def work_done(
    left_to_eager: Sequence[EagerFunction] = (), graph_breaks: Sequence[ReasonReport] = ()
) -> Work:
    """Count what this process did in functions compiled by cgpass.

    Args:
        left_to_eager: Functions that were not compiled; nothing of them is counted.
        graph_breaks: Those that no graph tells of.
    """
    work = Work(in_eager=bool(left_to_eager), graph_breaks=[*graph_breaks])
    work.fell_back += [_left(each.place, each.reason) for each in left_to_eager]
    for summary, runs in telemetry.graph_runs().values():
        work.graphs += 1
        _add_break(work, summary.graph_break)
        where = (
            summary.direction
            if summary.place is None
            else f"{summary.direction} of {summary.place}"
        )
        parts = {name: part for run in runs for name, part in run.parts.items()}
        known = calls_of_parts(summary, runs)
        if summary.skip is not None:
            whole = sum(run.tally.calls for run in runs)
            work.total += whole * summary.num_ops
            work.plain.append(f"{where} ({many(summary.num_ops, 'operator')}): {summary.skip}")
        for each in summary.partitions:
            work.total += known[each.name].calls * each.num_ops
            if each.captured and each.name in parts:
                _add_captured(work, each, known[each.name], parts[each.name], where)
            else:
                _add_eager(work, each, where)
    return work


def _left(place: str | None, reason: Reason | ReasonReport) -> str:
    return f"{why_left(place, reason)}; {reason.detail} [{reason.code}]; {reason.fix}"


def _add_break(work: Work, reason: Reason | None) -> None:
    if reason is None:
        return
    work.graph_breaks.append(reason)
    if reason.rest is not None:
        work.in_eager = True
        left = _left(reason.rest, reason)
        work.fell_back += [] if left in work.fell_back else [left]


def _add_captured(
    work: Work,
    part: PartitionSummary,
    ran: Ran,
    run: telemetry.PartitionRun,
    where: str,
) -> None:
    work.warmups += ran.warmups * part.num_ops
    work.captured += ran.replays * part.num_ops
    stats, reasons = run.stats, run.reasons
    if ran.warmups < stats.warmups:
        causes = (
            "; ".join(str(why) for why in reasons if why.code in NEW) or OTHER_FIXES["new_shape"]
        )
        work.plain.append(
            f"{where}, {part.name}: {stats.warmups} of {many(stats.calls, 'call')} were warm-ups, most with no recording "
            f"after them, since hardly a call was like one before it: {causes}"
        )
    for why in reasons:
        if why.code not in NEW:
            told = work.plain if why.is_chosen else work.fell_back
            told.append(f"{where}, {part.name}: {why}")


def _add_eager(work: Work, part: PartitionSummary, where: str) -> None:
    for reason in dict.fromkeys(part.why):
        failed = reason.code in _FAILED
        (work.fell_back if failed else work.plain).append(f"{where}, {part.name}: {reason}")


def verdict(work: Work, least: float) -> tuple[bool, str]:
    """Whether work was captured as it should, and that as text.

    Args:
        work: What was done.
        least: Share of the operators that has to be captured, 0 to 1.
    """
    if not work.graphs or not work.total:
        return False, "\n".join([_nothing(work), *_fell_back(work)])
    enough = work.captured >= least * work.total
    passes = enough and not work.fell_back
    head = (
        f"cgpass check: {'passed' if passes else 'FAILED'}: {share(work.captured, work.total)} of the "
        f"{many(work.total, 'operator')} that {ran(in_eager=work.in_eager)} were captured, {share(least, 1)} are wanted"
    )
    lines = [head]
    if work.warmups > _MANY * (work.warmups + work.total):
        lines.append(f"{work.warmups} more ran to warm up, which counts as neither")
    outside = breaks(work.graph_breaks, "operators")
    lines += [] if outside is None else [outside]
    lines += _fell_back(work)
    if not enough and work.plain:
        lines += ["runs without graphs:", *(f"  {line}" for line in work.plain)]
    return passes, "\n".join(lines)


def wrapped(text: str) -> str:
    """Text with its long lines in lines of at most 100 columns, the others indented further."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _nothing(work: Work) -> str:
    """What is said where nothing can be counted."""
    head = "cgpass check: FAILED: "
    if work.graphs:
        more = "" if work.fell_back else "; run more steps"
        return f"{head}nothing ran more often than to warm up{more}"
    if at := only_breaks(work.graph_breaks):
        return f"{head}nothing was compiled by cgpass: {at} left nothing to compile"
    if work.fell_back:
        return f"{head}nothing was compiled by cgpass"
    return (
        f'{head}nothing was compiled by cgpass: torch.compile(..., backend="cgpass") in this process is '
        "what is checked, callables graphed by hand are not"
    )


def _fell_back(work: Work) -> list[str]:
    return ["fell back:", *(f"  {line}" for line in work.fell_back)] if work.fell_back else []


def least_share(text: str) -> float:
    """A share written as `95%`, `95` or `0.95`.

    Raises:
        ReportError: It is none.
    """
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        number = -1.0
    if text.strip().endswith("%") or number > 1:
        number /= 100
    if not 0 <= number <= 1:
        raise ReportError(f"--min-captured is a share as 95% or 0.95, got {text!r}")
    return number


def run_script(script: str, args: Sequence[str], *, module: bool = False) -> int:
    """Run a script as `python script args` does; returns the status that it exits with.

    Args:
        script: A path, or the name of a module.
        args: Of the script.
        module: Whether it is a module, which runs as `python -m script args` does.

    Raises:
        ReportError: There is no such script or module.
        Exception: Whatever it raises.
    """
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    with _arguments(script, args, folder):
        if not (_is_module(script) if module else os.path.exists(script)):
            raise ReportError(f"there is no {'module' if module else 'script'} {script!r} to check")
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as exit_:
            if exit_.code is None:
                return 0
            if isinstance(exit_.code, int):
                return exit_.code
            sys.stderr.write(f"{exit_.code}\n")
            return 1
    return 0


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of its parent, or a name that is none
        return False


@contextlib.contextmanager
def _arguments(script: str, args: Sequence[str], folder: str) -> Iterator[None]:
    argv, path = sys.argv, sys.path
    sys.argv = [script, *args]
    sys.path = [folder, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
