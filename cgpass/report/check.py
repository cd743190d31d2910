"""`python -m cgpass check`: runs a script, and says whether enough of its work was captured."""

import concurrent.futures.thread
import os
import runpy
import sys
import threading
from collections.abc import Sequence

from cgpass.errors import ReportError
from cgpass.report.model import Facts
from cgpass.report.text import costs, headline, others, share, wrapped
from cgpass.telemetry.reason import NEW, many

_FAILED = frozenset({"capture", "failed_capture", "out_of_memory"})
"""Codes of what turned out not to be capturable only when it was captured."""
_NONE = frozenset({"raised", *NEW})
"""Codes of calls that did not fall back."""


def verdict(report: Facts, least: float) -> tuple[bool, str]:
    """Judge if a share (0 to 1) of the operators was captured and of training steps was one graph; returns the text, too."""
    (done, work), (whole, steps) = report.work, (report.whole_steps, report.steps)
    late = fell_back(report)
    passes = bool(work or steps) and done >= least * work and whole >= least * steps and not late
    said = []
    if work:
        captured = share(done * 1000 // work, 1000)  # less, not more
        ran = f"{many(work, 'operator')} that compiled code ran after its warm-ups"
        said.append(f"{captured} of the {ran} were captured")
    if steps:
        later = f"{many(steps, 'training step')} after first ones and warm-ups"
        said.append(f"{share(whole, steps)} of {later} were one graph")
    if said:
        said[-1] += f", {share(least, 1)} required"
    else:
        said = ["nothing to check: " * bool(report.others) + headline(report)]
    lines = wrapped(f"cgpass check: {'passed' if passes else 'FAILED'}: {'; '.join(said)}")
    lines += ["fell back:", *(row for each in late for row in wrapped(each, 2))] if late else []
    return passes, "\n".join([*lines, *(() if passes else others(report)), *costs(report)])


def fell_back(report: Facts) -> list[str]:
    """List everything that should have been captured or compiled, but ran without a graph."""
    found = list(map(str, report.left_to_eager))
    for graph in report.graphs:
        for part in graph.partitions:
            for reason in part.reasons:
                late = reason.code not in _NONE if part.captured else reason.code in _FAILED
                found += [f"{graph.name}, {part.name}: {reason}"] * late
    return list(dict.fromkeys(found))


def percentage(text: str) -> float:
    """Read a share as `95%`, `95` or `0.95`."""
    number = float(text.strip().removesuffix("%"))
    number /= 100 if text.strip().endswith("%") or number > 1 else 1
    if not 0 <= number <= 1:
        raise ValueError(text)
    return number


def run_script(script: str, args: Sequence[str], *, module: bool = False) -> int:
    """Run a script as `python script args` does, or a module as `python -m`; returns the status that it exits with.

    Raises:
        ReportError: There is no such script.
        Exception: Whatever it raises.
    """
    argv, path, threads = sys.argv, sys.path, {*threading.enumerate()}
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    sys.argv, sys.path = [script, *args], [folder, *path]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif os.path.exists(script):
            runpy.run_path(os.path.abspath(script), run_name="__main__")
        else:
            raise ReportError(f"there is no script {script!r} to check")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF  # as a shell sees it
        sys.stderr.write(f"{exit_.code}\n")
        return 1
    finally:
        # Python waits for them, too, and for those that they start; pools' workers wait for Python
        threads |= {*concurrent.futures.thread._threads_queues}
        while left := [t for t in threading.enumerate() if t not in threads and not t.daemon]:
            left[0].join()
        sys.argv, sys.path = argv, path
    return 0
