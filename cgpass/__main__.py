"""`python -m cgpass`: report, check, doctor and build."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cgpass.errors import ReportError
from cgpass.report import watch
from cgpass.report.check import percentage, run_script, verdict
from cgpass.report.doctor import doctor
from cgpass.report.report import Report, check_place, diff
from cgpass.runtime import native
from cgpass.telemetry import progress
from cgpass.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of the command line by default; returns the status to exit with."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    options = _parser().parse_args(given)
    if rest := getattr(options, "arguments", None):
        options.arguments = given[len(given) - len(rest) - (given[-len(rest) - 1] == "--") :]
    try:
        return options.run(options)
    except ReportError as error:
        sys.stderr.write(f"cgpass: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cgpass", description=__doc__)
    version = f"cgpass {VERSION}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True)
    about = "make a page of a report that was saved as JSON, or compare two"
    report = commands.add_parser("report", help=about)
    saved = "what cgpass.explain(...).save('report.json') wrote; with --diff two of them"
    report.add_argument("saved", nargs="+", help=saved)
    either = report.add_mutually_exclusive_group()
    either.add_argument("--diff", action="store_true", help="print what changed between two")
    either.add_argument("-o", "--output", help="ends in .html, .json or .txt; '-' prints the text")
    report.set_defaults(run=_report)
    check = commands.add_parser(
        "check",
        usage="python -m cgpass check [-h] [--min-captured SHARE] [--save FILE] [-m] script [arguments ...]",
        help="run a script, and fail if too little of it was captured or something fell back",
        description="Run a script as its own process would. It fails (status 1) if less than a share of the operators "
        "that functions compiled by cgpass ran after their warm-ups was captured, if calls passed a limit, a capture "
        "failed, or torch.compile gave up on a function. Warm-ups that no recording ever follows count, too. Operators are "
        "counted as traced, each as often as it ran. Callables graphed by hand are not checked: cgpass.expect asks for their "
        "replays. A script that fails itself keeps its status. Threads that outlive it can't use its __main__.",
    )
    wanted = "a share, as 95%% or 0.95 (default: 95%%)"
    check.add_argument(
        "--min-captured", metavar="SHARE", type=percentage, default="95%", help=wanted
    )
    check.add_argument("--save", metavar="FILE", help="write a report of all that ran to a file")
    module = "what follows is a module, as for python -m"
    check.add_argument("-m", dest="module", action="store_true", help=module)
    check.add_argument("script", help="a file or a folder that python can run")
    behind = "of the script: all that stands behind it, so options of check go before it"
    rest = check.add_argument("arguments", nargs=argparse.REMAINDER, help=behind)
    rest.required = False  # argparse names it among what is missing, though none may be
    check.set_defaults(run=_check)
    about = "look at torch, compiler, native code and environment, and try a tiny graph"
    machine = commands.add_parser("doctor", help=about, description=about)
    machine.set_defaults(run=lambda _: doctor(_say))
    build = commands.add_parser(
        "build",
        help="compile the native code ahead, as for a container",
        description="Compile the C++ that calls go through, and keep it in the cache folder ($XDG_CACHE_HOME/cgpass, else "
        "~/.cache/cgpass), where every process with this torch and this Python finds it. Else the first process that "
        "records does so. Fails (status 1), with what the compiler said, if that can't be.",
    )
    build.set_defaults(run=_build)
    return parser


def _report(options: argparse.Namespace) -> int:
    if len(options.saved) != 1 + options.diff:
        raise ReportError("two reports are compared: report --diff old.json new.json")
    report, *newer = map(Report.load, options.saved)
    if newer:
        told = diff(report, *newer)
    elif options.output == "-":
        told = str(report)
    else:
        told = options.output or Path(options.saved[0]).with_suffix(".html")
        report.save(told)
    _say(told)
    return 0


def _check(options: argparse.Namespace) -> int:
    save = None if options.save is None else Path(options.save).absolute()
    if save is not None:  # looked at before the script runs, which may go elsewhere
        check_place(save)
    with watch.watched() as report:
        status = run_script(options.script, options.arguments, module=options.module)
    if status:
        said = f"nothing was checked: {options.script} exits with {status}"
        sys.stderr.write(f"cgpass check: {said}\n")
        return status
    if save is not None:
        report.save(save)
    passes, text = verdict(report, options.min_captured)
    _say(text)
    return 0 if passes else 1


def _say(told: object) -> None:
    """Print a text, also where stdout can't encode what users call things; nothing where it is closed."""
    with contextlib.suppress(AttributeError, ValueError):  # None, or closed
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(f"{told}\n".encode(encoding, "backslashreplace").decode(encoding))


def _build(_: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with the compiler
    try:
        with progress.shown("compiling native code", "auto"):
            path = native.build(keep=True)
            native.load(path)
    except native.BuildError as error:
        said = f"{error.said.rstrip()}\n" if error.said else ""
        sys.stderr.write(f"{said}cgpass build: {error}. {error.fix}.\n")
        return 1
    _say(f"{path}\nnative code for torch {torch.__version__} is there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
