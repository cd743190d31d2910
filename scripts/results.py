"""What is shown of the results in docs/results: README's section "Measured", docs/performance.md, tables and plots.

    python scripts/results.py --check             # is all of it in step? needs no matplotlib
    python scripts/results.py --write             # bring it in step
    python scripts/results.py --take FOLDER ...   # keep what scripts/gpu_check.sh wrote, then --write

--take recognises results by what they hold, and merges several of one commit: bench.json of different models, say.
Results of different commits or machines are refused, and nothing is kept then. A model that lacks arms of the kept one,
was stopped by an error, or has no figure of cgpass or unchecked losses of it is refused, and a result without models or
depths that the kept one has: with --into models that were not measured stay as they are. Failed tests and tiny models are never kept, and --check names them. Drawing needs matplotlib, which `pip install -e ".[dev]"`
installs; a plot is drawn when the figures that it notes in its metadata are others, or with --redraw.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from benchlib import breakdown, measured, plots, report, taking
from benchlib.measured import Results
from doc_tables import with_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
TABLES = ("bench", "memory", "inference", "overhead")
PLOTS = {"bench": "steps", "overhead": "overhead"}


def stored(directory: Path) -> dict[str, Results]:
    """The results in a directory, by machine and part."""
    found: dict[str, Results] = {}
    for path in sorted(directory.glob("*.json")):
        data = json.loads(path.read_text())
        part = taking.part(data)
        machine = taking.machine(data) if part else ""
        if path.name != f"{part}-{machine}.json":
            raise SystemExit(f"{path.name} holds results of {part} on {machine or 'no machine'}")
        found.setdefault(machine, {})[part] = data
    return found


def texts(found: dict[str, Results], directory: Path, readme: Path) -> dict[Path, str]:
    """What documents and tables have to be; documents show the machine that was measured last."""
    wanted = {
        directory / f"{part}-{machine}.md": report.render(results[part])
        for machine, results in found.items()
        for part in TABLES
        if part in results
    }
    measured_last = max(
        (results["bench"]["meta"]["time"], machine)
        for machine, results in found.items()
        if "bench" in results
    )[1]
    shown = found[measured_last], measured_last
    wanted[readme] = with_table(readme.read_text(), "measured", measured.section(*shown))
    performance = directory.parent / PERFORMANCE.name
    wanted[performance] = with_table(
        performance.read_text(), "breakdown", breakdown.section(*shown)
    )
    return wanted


def pictures(found: dict[str, Results], directory: Path) -> dict[Path, dict[str, Any]]:
    """The figures that every plot has to show."""
    return {
        directory / f"{name}-{machine}.svg": plots.figures(results[part])
        for machine, results in found.items()
        for part, name in PLOTS.items()
        if part in results
    }


def problems(directory: Path = RESULTS, readme: Path = README) -> list[str]:
    """What is out of step, or names a place on some machine."""
    found = stored(directory)
    wanted, drawn = texts(found, directory, readme), pictures(found, directory)
    again = "run scripts/results.py --write"
    said = [
        f"{part}-{machine}.json: {why}"
        for machine, results in found.items()
        for part, data in results.items()
        if (why := taking.why_no_result(data))
    ]
    said += [
        f"{path.name} is out of step: {again}"
        for path, text in wanted.items()
        if not path.exists() or path.read_text() != text
    ]
    for path, what in drawn.items():
        if plots.shown(path) != what:
            said.append(f"{path.name} shows other figures than the results: {again}")
    for path in sorted(directory.iterdir()):
        known = path in wanted or path in drawn or path.name.startswith("faults-")
        if path.suffix in (".md", ".svg") and not known:
            said.append(f"{path.name} is of no result: remove it")
        elif place := taking.PATH.search(path.read_text()):
            said.append(f"{path.name} names a place on a machine: {place.group()}")
    return said


def write(directory: Path = RESULTS, readme: Path = README, *, redraw: bool = False) -> int:
    """Brings tables and plots in step; fails if a plot is to be drawn and nothing can."""
    found = stored(directory)
    for path, text in texts(found, directory, readme).items():
        path.write_text(text)
    todo = {
        path: what
        for path, what in pictures(found, directory).items()
        if redraw or plots.shown(path) != what
    }
    if todo and importlib.util.find_spec("matplotlib") is None:
        names = ", ".join(path.name for path in todo)
        print(f'not drawn: {names}; needs pip install -e ".[dev]"', file=sys.stderr)
        return 1
    for path, what in todo.items():
        plots.draw(path, what)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if something is out of step")
    what.add_argument("--write", action="store_true", help="update README, tables and plots")
    what.add_argument("--take", type=Path, nargs="+", metavar="FOLDER", help="or files: keep them")
    parser.add_argument(
        "--into", action="store_true", help="keep models that were not measured as they are"
    )
    parser.add_argument("--commit", default="", help="of the results, where they don't say it")
    parser.add_argument(
        "--redraw", action="store_true", help="plots whose figures are the same, too"
    )
    args = parser.parse_args(arguments)
    if not args.take and (args.into or args.commit):
        parser.error("--into and --commit are about what --take takes")
    if args.check:
        said = problems()
        for line in said:
            print(line, file=sys.stderr)
        return 1 if said else 0
    if args.take:
        for path in taking.store(taking.taken(args.take, args.commit), RESULTS, into=args.into):
            print(f"kept {path.name}")
    return write(redraw=args.redraw)


if __name__ == "__main__":
    sys.exit(main())
