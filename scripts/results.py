"""Keeps the results in docs/results, and what is shown of them: tables, plots, README and docs/performance.md.

    python scripts/results.py --check             # is all of it in step?
    python scripts/results.py --write             # bring it in step
    python scripts/results.py --take FOLDER ...   # keep what scripts/gpu_check.sh wrote, then --write

--take merges files of one part and one commit from several folders: models that were measured apart. Results that failed,
differ, are of tiny models or of no commit are refused, and nothing is kept then.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchlib import compare, report
from benchlib.models import REAL, SPECS
from benchlib.report import differs, number, table, value
from doc_tables import with_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
PARTS = {
    "bench": "training steps",
    "memory": "memory",
    "inference": "calls without gradients",
    "overhead": "host time",
    "step": "whole steps",
    "graphed": "graphed callables",
    "recompute": "recomputation",
    "start": "first steps",
    "dist-bench": "training on several devices",
    "tests": "tests",
    "dist": "tests on several devices",
}
PLOTS = {"bench": "steps", "overhead": "overhead"}
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
    said = [] if "failed" in data else compare.problems(data)
    said += ["tests failed"] * (data.get("ok") is False)
    said += ["tiny models"] * bool(data["meta"].get("tiny"))
    said += ["of no commit: set BENCH_COMMIT"] * (not data["meta"]["commit"])
    return [f"{part}: {each}" for each in said]


def merged(one: Data, other: Data) -> Data:
    """Return both results of a part; of a model that both have, the second's."""
    if one["meta"]["commit"] != other["meta"]["commit"] or machine(one) != machine(other):
        raise SystemExit("results of one part are of different commits or machines")
    places = {(each["mode"], each["model"]): each for each in one["results"] + other["results"]}
    return one | {"results": list(places.values())}


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


def pivot(
    results: Results, mode: str, models: Iterable[str], arms: Iterable[str], key: str, **how: Any
) -> str:
    """Return a table of one quantity, a row per model and a column per arm."""
    rows = []
    for model in models:
        title, found = known(results, mode, model)
        if found:
            rows.append([title, *(cell(found, arm, key, **how) for arm in arms)])
    return table(["", *arms], rows) if rows else ""


def ratio(arms: dict[str, Data], key: str, name: str = "cgpass", other: str = "default") -> str:
    ours, theirs = (value(arms.get(each, {}), key) for each in (name, other))
    return number(ours / theirs) if ours and theirs else ""


def on(results: Results) -> str:
    meta = results["bench"]["meta"]
    return f"One {meta['gpu'].removeprefix('NVIDIA ')}, torch {meta['torch'].split('+')[0]}"


def readme_section(results: Results, where: str) -> str:
    """Return README's tables."""
    rows = []
    for model in REAL:
        title, arms = known(results, "train", model)
        if arms:
            steps = [cell(arms, name, "step_ms") for name in (*RIVALS, "limit")]
            rows.append([title, *steps, ratio(arms, "peak_reserved_bytes")])
    head = ["step, ms", *RIVALS, "limit", "peak memory, cgpass / default"]
    links = ", ".join(
        f"[{text}](docs/results/{part}-{where}.{'json' if 'failed' in results[part] else 'md'}) "
        f"({results[part]['meta']['commit']})"
        for part, text in PARTS.items()
        if part in results
    )
    layers = []
    for mode, text in (("inference", "call without gradients"), ("train", "forward and backward")):
        for model in ("stack1", "stack100"):
            title, arms = known(results, mode, model)
            us = [cell(arms, name, "host_ms", 0, 1e3) for name in RIVALS]
            layers.append([f"{title}, {text}", *us])
    blocks = [
        f"{on(results)}. A step (forward, backward, fused AdamW; bf16 autocast), the device waited for:\n",
        table(head, rows),
        '"limit" is one graph of the same kernels, captured by hand.\n',
        f"![Step time relative to the limit](docs/results/steps-{where}.svg)\n",
        "A call without gradients, host microseconds until it returns:\n",
        pivot(results, "inference", REAL, RIVALS, "host_ms", digits=0, times=1e3),
        "Small layers of four parameters each, host microseconds:\n",
        table(["", *RIVALS], layers),
        f"All figures, by the commit that was measured: {links}.\n",
    ]
    return "\n".join(blocks)


def performance_section(results: Results) -> str:
    """Return the tables of docs/performance.md."""
    rows, starts = [], []
    for model in REAL:
        title, arms = known(results, "train", model)
        if arms:
            of = [(key, name) for key in ("step_ms", "loop_ms") for name in ("cgpass", "limit")]
            cells = [cell(arms, name, key) for key, name in of]
            rest = [cell(arms, "cgpass", key) for key in ("host_ms", "gpu_busy_ms")]
            rows.append([title, *cells, *rest])
        title, arms = known(results, "start", model)
        if arms:
            found = compare.with_starts({"mode": "start", "arms": arms})
            for key, text in (
                ("cold_s", "until all is replayed"),
                ("warm_s", "second process, first step"),
            ):
                seconds = [cell(found, name, key) for name in RIVALS]
                starts.append([f"{title}, {text}", *seconds])
    head = ["ms", "step", "limit's step", "loop", "limit's loop", "host", "GPU busy"]
    spread = [name for name, spec in SPECS.items() if spec.spread]
    graphed = ("eager", "torch-graphed", "graphed")
    blocks = [
        f'{on(results)}. In "step" the host waits for the device after each step, in "loop" it does not.\n',
        table(head, rows),
        "Tensor parallel and sharded training on two GPUs, milliseconds of a step:\n",
        pivot(results, "train", spread, RIVALS, "step_ms"),
        "Seconds from `torch.compile`, with nothing cached and in a second process:\n",
        table(["", *RIVALS], starts),
        "A small layer graphed by hand, host microseconds of forward and backward:\n",
        pivot(results, "train", ["layer"], graphed, "host_ms", digits=0, times=1e3),
        "Checkpointed attentions, milliseconds of a step, with random numbers to be drawn again and without:\n",
        pivot(
            results,
            "train",
            ["attentions", "attentions_nodrop"],
            ("default", "reduce-overhead", "cgpass", "cgpass:rng=paired"),
            "step_ms",
        ),
    ]
    return "\n".join(blocks)


def texts(
    found: dict[str, Results], directory: Path, readme: Path, performance: Path
) -> dict[Path, str]:
    """Return what tables, plots and documents have to be; documents show the machine that was measured last."""
    wanted: dict[Path, str] = {}
    for where, results in found.items():
        for part, data in results.items():
            if "results" in data:
                wanted[directory / f"{part}-{where}.md"] = report.render(data)
            if part in PLOTS:
                wanted[directory / f"{PLOTS[part]}-{where}.svg"] = report.plot(data)
    last = max((r["bench"]["meta"]["time"], where) for where, r in found.items() if "bench" in r)[1]
    section = readme_section(found[last], last)
    wanted[readme] = with_table(readme.read_text(), "measured", section)
    section = performance_section(found[last])
    wanted[performance] = with_table(performance.read_text(), "breakdown", section)
    return wanted


def problems(
    directory: Path = RESULTS, readme: Path = README, performance: Path = PERFORMANCE
) -> list[str]:
    """Return what is out of step, is no result, or is of none."""
    found = stored(directory)
    wanted = texts(found, directory, readme, performance)
    said = [why for results in found.values() for part in results.items() for why in refused(*part)]
    said += [
        f"{path.name} is out of step: run scripts/results.py --write"
        for path, text in wanted.items()
        if not path.exists() or path.read_text() != text
    ]
    others = {path for path in directory.iterdir() if path.suffix != ".json"} - wanted.keys()
    others = {path for path in others if not path.name.startswith("faults-")}
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
        for path, text in texts(stored(RESULTS), RESULTS, README, PERFORMANCE).items():
            path.write_text(text)
    said = problems()
    for line in said:
        print(line, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
