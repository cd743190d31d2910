"""`python -m cgpass report`, `python -m cgpass check` and `python -m cgpass build`."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cgpass import torch_private
from cgpass.errors import ReportError
from cgpass.report.check import least_share, run_script, verdict, work_done, wrapped
from cgpass.report.collect import snapshot
from cgpass.report.frames import left_to_eager, new_breaks, noted
from cgpass.report.model import Report, check_ending
from cgpass.report.outside import with_outside
from cgpass.runtime import native
from cgpass.telemetry import progress
from cgpass.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the status to exit with.

    Args:
        arguments: Those of the command line by default.
    """
    options = _parser().parse_args(arguments)
    if options.command == "build":
        return _build()
    try:
        return _report(options) if options.command == "report" else _check(options)
    except ReportError as error:
        sys.stderr.write(f"cgpass: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cgpass", description=__doc__)
    parser.add_argument(
        "--version", action="version", version=f"cgpass {VERSION}, torch {torch.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="make a page of a report that was saved as JSON")
    report.add_argument("saved", help="what cgpass.explain(...).save('report.json') wrote")
    report.add_argument("-o", "--output", help="ends in .html, .json or .txt; '-' prints the text")
    check = commands.add_parser(
        "check",
        usage="python -m cgpass check [-h] [--min-captured SHARE] [--save FILE] [-m] script [arguments ...]",
        help="run a script, and fail if too little of it was captured or something fell back",
        description="Run a script as its own process would. It fails (status 1) if less than a share of the operators "
        "that functions compiled by cgpass ran after their warm-ups was captured, or if something that was to be "
        "captured ran without a graph; functions that torch.compile left to eager count as such. Warm-ups that no recording ever follows count, too. Operators are counted as "
        "traced, each as often as it ran; kernels are not. A script that fails itself keeps its status.",
    )
    check.add_argument(
        "--min-captured",
        metavar="SHARE",
        default="95%",
        help="a share, as 95%% or 0.95 (default: 95%%)",
    )
    check.add_argument(
        "--save", metavar="FILE", help="write a report of all that was compiled to a file"
    )
    check.add_argument(
        "-m", dest="module", action="store_true", help="what follows is a module, as for python -m"
    )
    check.add_argument("script", help="a file or a folder that python can run")
    rest = check.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="of the script: all that stands behind it, so options of check go before it",
    )
    commands.add_parser(
        "build",
        help="compile the native code ahead, as for a container",
        description="Compile the C++ that calls go through, and keep it in the cache folder ($XDG_CACHE_HOME/cgpass, else "
        "~/.cache/cgpass), where every process with this torch and this Python finds it. Else the first process that "
        "records does so. Fails (status 1), with what the compiler said, if that can't be.",
    )
    rest.required = False  # argparse names it among what is missing, though none may be
    return parser


def _report(options: argparse.Namespace) -> int:
    saved = Path(options.saved)
    try:
        data = json.loads(saved.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{saved} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{saved} is no JSON: {error}") from error
    report = Report.from_dict(data)
    if options.output == "-":
        sys.stdout.write(f"{report}\n")
        return 0
    output = Path(options.output or saved.with_suffix(".html"))
    _check_place(output)
    report.save(output)
    sys.stdout.write(f"{output}\n")
    return 0


def _check(options: argparse.Namespace) -> int:
    least = least_share(options.min_captured)
    save = (
        None if options.save is None else Path(options.save).absolute()
    )  # the script may go elsewhere
    if save is not None:
        _check_place(save)
    breaks = torch_private.graph_breaks()
    with noted() as before:
        status = run_script(options.script, options.arguments, module=options.module)
        left = left_to_eager(before)
    if status:
        sys.stderr.write(
            f"cgpass check: nothing was checked: {options.script} exits with {status}\n"
        )
        return status
    report = with_outside(snapshot(), left, new_breaks(breaks))
    if save is not None:
        report.save(save)
    passes, text = verdict(work_done(report.left_to_eager, report.graph_breaks), least)
    sys.stdout.write(f"{wrapped(text)}\n")
    return 0 if passes else 1


def _build() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with the compiler
    start = time.monotonic()
    try:
        with progress.shown("compiling native code", "auto"):
            path = native.build(keep=True)
            native.load(path)
    except native.BuildError as error:
        said = f"{error.said.rstrip()}\n" if error.said else ""
        sys.stderr.write(f"{said}cgpass build: {error}. {error.fix}.\n")
        return 1
    took = time.monotonic() - start
    sys.stdout.write(
        f"{path}\nnative code for torch {torch.__version__} is there, after {took:.1f} s\n"
    )
    return 0


def _check_place(path: Path) -> None:
    check_ending(path)
    if not path.parent.is_dir():
        raise ReportError(f"the folder {str(path.parent)!r} to save the report in does not exist")


if __name__ == "__main__":
    sys.exit(main())
