"""Keeps the results in docs/results, what is shown of them (tables, the plot, README), and tables that come from the code.

    python scripts/results.py --check             # is all of it in step?
    python scripts/results.py --write             # bring it in step
    python scripts/results.py --take FOLDER ...   # keep what scripts/gpu_check.sh wrote, then --write

--take merges files of one part and one commit from several folders: models that were measured apart. Results that failed,
differ, are of tiny models or of no commit are refused, and nothing is kept then.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchlib import report
from benchlib.models import REAL
from benchlib.report import differs, number, table, value

from cgpass.compile.facts.op_tables import FIXES
from cgpass.options import Options
from cgpass.telemetry import CallStats, CompileStats
from cgpass.telemetry.reason import OTHER_FIXES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
README = ROOT / "README.md"
PARTS = {
    "bench": "training steps",
    "inference": "calls without gradients",
    "overhead": "host time",
    "step": "whole steps",
    "depths": "whole steps by depth",
    "graphed": "graphed callables",
    "recompute": "recomputation",
    "start": "first steps",
    "dist": "tests on several devices",
}
RIVALS = ("default", "reduce-overhead", "cgpass")
Data = dict[str, Any]
Results = dict[str, Data]
"""By part."""


def machine(data: Data) -> str:
    """Return the end of the names of files that hold results of this machine, as "h200-torch2.11"."""
    gpu = data["meta"]["gpu"].removeprefix("NVIDIA ").split()[0].lower()
    return f"{gpu}-torch{'.'.join(data['meta']['torch'].split('.')[:2])}"


def stored(directory: Path) -> dict[str, Results]:
    """Return the results in a directory, by machine and part."""
    found: dict[str, Results] = {}
    for path in sorted(directory.glob("*.json")):
        data = json.loads(path.read_text())
        where = machine(data)
        part = path.stem.removesuffix(f"-{where}")
        if part not in PARTS:
            raise SystemExit(f"{path.name}: results of {where}, of no part that is known")
        found.setdefault(where, {})[part] = data
    return found


def refused(part: str, data: Data) -> list[str]:
    """Return why results are not to be kept."""
    said = [] if "failed" in data else report.problems(data)
    said += ["tests failed"] * (data.get("ok") is False)
    said += ["tiny models"] * bool(data["meta"].get("tiny"))
    said += ["of no commit: set BENCH_COMMIT"] * (not data["meta"]["commit"])
    return [f"{part}: {each}" for each in said]


def merged(one: Data, other: Data) -> Data:
    """Return both results of a part; of a model that both have, the second's."""
    if one["meta"]["commit"] != other["meta"]["commit"] or machine(one) != machine(other):
        raise SystemExit("results of one part are of different commits or machines")
    places = {(each["mode"], each["model"]): each for each in one["results"] + other["results"]}
    left = [*one.get("left_out", ()), *other.get("left_out", ())]
    left = [each for each in left if tuple(reversed(each.split(", "))) not in places]
    meta = one["meta"] | {"command": "; ".join(each["meta"]["command"] for each in (one, other))}
    return one | {"meta": meta, "results": list(places.values()), "left_out": left}


def take(folders: Iterable[Path], directory: Path) -> list[Path]:
    """Keep the results in some folders; nothing, if one of them is refused."""
    found: Results = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            if path.stem in PARTS:
                data = json.loads(path.read_text())
                found[path.stem] = merged(found[path.stem], data) if path.stem in found else data
    if said := [why for part, data in found.items() for why in refused(part, data)]:
        raise SystemExit("\n".join(["nothing is kept:", *said]))
    paths = []
    for part, data in found.items():
        paths.append(directory / f"{part}-{machine(data)}.json")
        paths[-1].write_text(json.dumps(data, indent=1) + "\n")
    return paths


def known(results: Results, mode: str, model: str) -> tuple[str, dict[str, Data]]:
    """Return a model's title and what is known of its arms from all parts; nothing where it was not measured."""
    title, found = "", {}
    for data in results.values():
        for each in data.get("results", ()):
            if (each["mode"], each["model"]) == (mode, model):
                title = each["title"]
                for name, entry in each["arms"].items():
                    found[name] = entry | found.get(name, {})
    return title, found


def cell(arms: dict[str, Data], name: str, key: str, digits: int = 2, times: float = 1.0) -> str:
    entry = arms.get(name, {})
    found = value(entry, key)
    return "" if found is None else number(found * times, digits) + " (differs)" * differs(entry)


def readme_section(results: Results, where: str) -> str:
    """Return README's tables."""
    steps, wholes, calls = [], [], []
    for model in REAL:
        title, arms = known(results, "train", model)
        peaks = [value(arms.get(name, {}), "peak_reserved_bytes") for name in ("cgpass", "default")]
        memory = number(peaks[0] / peaks[1]) if all(peaks) else ""
        cells = [cell(arms, name, "step_ms") for name in (*RIVALS, "limit")]
        steps += [[title, *cells, memory]] if arms else []
    for model in ("actor_critic", "mlp3", "mlp50", "resnet50"):
        title, arms = known(
            {part: results[part] for part in results.keys() & {"step"}}, "train", model
        )
        cells = [cell(arms, name, "step_ms") for name in (*RIVALS[1:], "cgpass-step", "limit-step")]
        wholes += [[title, *cells]] if arms.get("cgpass-step") else []
    for model in REAL:
        title, arms = known(results, "inference", model)
        cells = [cell(arms, name, "host_ms", 0, 1e3) for name in RIVALS]
        calls += [[title, *cells]] if all(cells) else []
    meta = results["bench"]["meta"]
    on = (
        f"One {meta['gpu'].removeprefix('NVIDIA ')} and 16 cores of {meta['cores']} (four models ran side by side on four GPUs), torch "
        f"{meta['torch'].split('+')[0]}. Milliseconds of a step (forward, backward, fused AdamW; bf16 autocast), "
        "until the GPU is done:\n"
    )
    whole = (
        '"limit" is one graph of the same kernels, captured by hand where that is possible. The next table adds `cgpass.train_step`; its '
        'graphs "by hand" contain the optimizer, too:\n'
    )
    commits = Counter(data["meta"]["commit"] for data in results.values())
    ((commit, _),) = commits.most_common(1)
    links = ", ".join(
        f"[{text}](docs/results/{part}-{where}.{'json' if 'failed' in results[part] else 'md'})"
        + f" ({results[part]['meta']['commit']})" * (results[part]["meta"]["commit"] != commit)
        for part, text in PARTS.items()
        if part in results
    )
    of = f" of commit {commit}, {meta['time'].split()[0]}"
    blocks = [
        "<!-- --8<-- [start:measured] -->",
        on,
        table(["step", *RIVALS, "limit", "peak reserved memory, cgpass / default"], steps),
        whole,
        table(["step", *RIVALS[1:], "train_step", "by hand"], wholes),
        "Host microseconds until a call without gradients returns:\n",
        table(["call", *RIVALS], calls) + "<!-- --8<-- [end:measured] -->\n",
        f"All figures{of}: {links}.\n",
    ]
    return "\n".join(blocks)


def texts(directory: Path, readme: Path) -> dict[Path, str]:
    """Return what tables, plots and README have to be; README shows the machine that was measured last."""
    found, wanted = stored(directory), {}
    for where, results in found.items():
        for part, data in results.items():
            if "results" in data:
                wanted[directory / f"{part}-{where}.md"] = report.render(data)
        if "bench" in results:
            wanted[directory / f"steps-{where}.svg"] = report.plot(results["bench"])
        if "depths" in results and (curves := report.curves(results["depths"])):
            wanted[directory / f"depths-{where}.svg"] = curves
    last = max((r["bench"]["meta"]["time"], where) for where, r in found.items() if "bench" in r)[1]
    wanted[readme] = with_table(readme.read_text(), "measured", readme_section(found[last], last))
    return wanted


def docstrings(cls: type) -> dict[str, str]:
    """Return the string literal that stands under each field of a class."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return found


def values(field: dataclasses.Field) -> str:
    """Return the default and what else is allowed."""
    if allowed := field.metadata.get("allowed"):
        return ", ".join(f'`"{value}"`' for value in allowed)
    if "at_least" in field.metadata:
        return f"`{field.default}`, at least {field.metadata['at_least']}"
    return f"`{getattr(Options(), field.name)!r}`"


def options_table() -> str:
    meanings = docstrings(Options)
    fields = dataclasses.fields(Options)
    rows = [[f"`{field.name}`", values(field), meanings[field.name]] for field in fields]
    return table(["option", "values (default first)", "meaning"], rows)


def reasons_table() -> str:
    fixes = sorted({**FIXES, **OTHER_FIXES}.items())
    return table(["code", "what to do"], [[f"`{code}`", fix] for code, fix in fixes])


def counters_table() -> str:
    meanings = docstrings(CallStats) | docstrings(CompileStats)
    rows = [[f"`{name}`", meaning] for name, meaning in meanings.items()]
    return table(["counter", "what it counts"], rows)


def depths() -> str:
    """Return the plots of step time over width and depth, of all machines on which a grid was measured."""
    said = "Step time over the number of layers, for each width, with logarithmic axes"
    paths = sorted(RESULTS.glob("depths-*.svg"))
    return "".join(f"![{said}](results/{path.name})\n" for path in paths)


TABLES = {
    "depths": (ROOT / "docs" / "train-step.md", depths),
    "options": (ROOT / "docs" / "options.md", options_table),
    "reasons": (ROOT / "docs" / "explain.md", reasons_table),
    "counters": (ROOT / "docs" / "explain.md", counters_table),
}


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with the table between its markers."""
    begin, end = (f"<!-- {name}: {edge} -->\n" for edge in ("begin", "end"))
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there are no markers for the table of {name}")
    return head + begin + table + end + tail


def documents() -> dict[Path, str]:
    """Return what documents with tables that come from the code have to be."""
    found: dict[Path, str] = {}
    for name, (path, shown) in TABLES.items():
        found[path] = with_table(found.get(path) or path.read_text(), name, shown())
    return found


def out_of_step(wanted: dict[Path, str]) -> list[str]:
    """Return what is said of files that aren't as they have to be."""
    return [
        f"{path.name} is out of step: run scripts/results.py --write"
        for path, text in wanted.items()
        if not path.exists() or path.read_text() != text
    ]


def problems(directory: Path = RESULTS, readme: Path = README) -> list[str]:
    """Return what is out of step, is no result, or is of none."""
    wanted, found = texts(directory, readme), stored(directory).values()
    said = [why for results in found for part in results.items() for why in refused(*part)]
    said += out_of_step(wanted)
    others = {path for path in directory.iterdir() if path.suffix != ".json"} - wanted.keys()
    others = {path for path in others if not path.name.startswith(("faults-", "gpu-tests"))}
    return said + [f"{path.name} is of no result: remove it" for path in sorted(others)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if something is out of step")
    what.add_argument("--write", action="store_true", help="write tables, plots and documents")
    what.add_argument("--take", type=Path, nargs="+", metavar="FOLDER", help="keep what is in them")
    args = parser.parse_args(argv)
    if args.take:
        for path in take(args.take, RESULTS):
            print(f"kept {path.name}")
    if not args.check:
        for path, text in texts(RESULTS, README).items():
            path.write_text(text)
        for path, text in documents().items():  # which show what is there by now
            path.write_text(text)
    said = problems() + out_of_step(documents())
    for line in said:
        print(line, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
