"""Results as they are kept: recognised, merged over runs of one commit, without places on a machine."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchlib.measured import Results, device, torch_version
from benchlib.report import command_text
from benchlib.shape import is_tiny

KINDS = {
    "time": "bench",
    "memory": "memory",
    "inference": "inference",
    "overhead": "overhead",
    "distributed": "dist-bench",
    "start": "start",
}
# What is measured of an arm, by part.
FIGURE = {"bench": "step_ms", "memory": "peak_reserved_bytes", "inference": "host_ms"}
# Parts in which losses of cgpass are compared with those without graphs.
CHECKED = ("bench", "inference")
# Parts that are tests.
TESTS = ("tests", "dist")
# A path from the root of a file system, in the middle of any text.
PATH = re.compile(r"(?<![\w.:/~-])(?:~|\.\.)?/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def part(data: Any) -> str | None:
    """What a JSON holds results of, if it is any."""
    if not isinstance(data, dict):
        return None
    if "kind" in data:
        return KINDS.get(data["kind"])
    if "pairs" in data:
        return "recompute"
    return "graphed" if "ratio_to_torch" in data else data.get("part")


def machine(data: dict[str, Any]) -> str:
    """How files are named after the device and torch: h200-torch2.11."""
    name = re.sub(r"[^\w.]+", "-", device(data)).strip("-").lower()
    return f"{name}-torch{torch_version(data)}"


def facts(data: dict[str, Any]) -> dict[str, Any]:
    """Where commit and command stand."""
    return data.get("meta", data)


def without_paths(value: Any) -> Any:
    """The same with files by their names, in every text."""
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    return PATH.sub("", value) if isinstance(value, str) else value


def why_no_result(data: dict[str, Any]) -> str | None:
    """Why something is kept on no machine: tests that failed, tiny models."""
    if is_tiny(data):
        return "measured with tiny models"
    failed = [each["name"] for each in data.get("failed") or ()]
    if part(data) not in TESTS or (data.get("ok") is True and not failed):
        return None
    skipped = [f"skipped, {reason}" for reason in data.get("unknown_skips") or ()]
    named = ", ".join(failed + skipped)
    return "its tests failed" + (f": {named}" if named else "")


def found_in(places: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """The results in files and folders, by part."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place in places:
        for path in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            try:
                data = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise SystemExit(f"{path}: {error}") from error
            name = part(data)
            if name is not None and (why := why_no_result(data)):
                raise SystemExit(f"{path}: {why}")
            if name is None or data.get("passed") == 0:  # no tests for this machine
                print(f"left out, no results: {path.name}")
                continue
            if device(data).split()[0] in ("no", "cpu"):
                raise SystemExit(f"{path}: measured without a GPU")
            found.setdefault(name, []).append(data)
    if not found:
        raise SystemExit(f"no results in {', '.join(map(str, places))}")
    return found


def one_commit(runs: list[dict[str, Any]], given: str) -> str:
    """The commit of all runs; `given` where they don't say."""
    known = {facts(data).get("commit") or given for data in runs}
    if "" in known:
        raise SystemExit("results that don't say of which commit: give --commit")
    short = sorted({commit[:7] for commit in (*known, given) if commit})
    if len(short) > 1:
        raise SystemExit(f"results of different commits: {', '.join(short)}")
    return short[0]


def without_failed(entries: list[dict[str, Any]], name: Callable[[Any], Any]) -> dict[Any, Any]:
    """Entries by name; of two, the one that was not stopped by an error."""
    joined: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        known = joined.get(name(entry))
        if known is None or "error" in known:
            joined[name(entry)] = entry
        elif "error" not in entry:
            raise SystemExit(f"measured in two of the results: {name(entry)}")
    return joined


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several of the same part, machine and commit, by model or by mode and layers."""
    first = runs[0]
    if len(runs) == 1:
        return first
    if "meta" not in first or "modes" in first:
        raise SystemExit(f"{part(first)}: more than one result, which can't be merged")
    for key in ("torch", "gpu", "driver"):
        values = sorted({facts(data)[key] for data in runs})
        if len(values) > 1:
            raise SystemExit(f"results of different machines: {key} {', '.join(values)}")
    entries = "rows" if "rows" in first else "results"
    name = (lambda e: (e["mode"], e["layers"])) if entries == "rows" else (lambda e: e["model"])
    joined = without_failed([entry for data in runs for entry in data[entries]], name)
    commands = dict.fromkeys(facts(data)["command"] for data in runs)
    meta = first["meta"] | {
        "command": " && ".join(commands),
        "time": min(facts(data)["time"] for data in runs),
    }
    if all("seconds" in facts(data) for data in runs):
        meta["seconds"] = round(sum(facts(data)["seconds"] for data in runs), 1)
    jobs = {job for data in runs for job in data.get("left_out", ())}
    kept = first | {"meta": meta, entries: list(joined.values())}
    return with_left_out(kept, sorted(jobs))


def with_left_out(data: dict[str, Any], jobs: list[str]) -> dict[str, Any]:
    """A result of models that says which of these jobs, a model or an arm of one each, it is without."""
    arms = {model["model"]: model["arms"] for model in data.get("results", ())}
    rest = []
    for job in jobs:
        model, _, arm = job.partition(".")
        if model not in arms or (arm and arm not in arms[model]):
            rest.append(job)
    kept = {key: value for key, value in data.items() if key != "left_out"}
    return kept | ({"left_out": rest} if rest else {})


def why_not_kept(entry: dict[str, Any], kept: dict[str, Any] | None, name: str) -> str | None:
    """Why a model that was measured is not put in the place of the one that is kept.

    Args:
        entry: What was measured.
        kept: What it would replace, if anything.
        name: The part that it is of.
    """
    figure = FIGURE.get(name)
    if "error" in entry:
        return f"stopped by {entry['error'][:120]}"
    arms = entry["arms"]
    cgpass = arms.get("cgpass", {})
    if "error" in cgpass or (figure and figure not in cgpass):
        return "no figure of cgpass"
    if name in CHECKED and "error" in (cgpass.get("check") or {"error": "none"}):
        return "losses of cgpass were not compared"
    for key in ("stages", "kernels"):
        if "error" in (cgpass.get(key) or {}):
            return f"no {key} of cgpass: {cgpass[key]['error'][:120]}"
    lost = [
        name
        for name, arm in (kept or {"arms": {}})["arms"].items()
        if name not in arms
        or ("error" not in arm and "error" in arms[name])
        or (figure in arm and figure not in arms[name])
    ]
    return f"without {', '.join(lost)}, which what is kept has" if lost else None


def holds_models(data: dict[str, Any]) -> bool:
    """Whether a result is one of models."""
    return "meta" in data and isinstance(data.get("results"), list)


def gaps(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """What a result lacks that the kept one has, or that it should have where none is kept.

    Args:
        old: What is kept, of the same part.
        new: What would be kept in its place.
    """
    if "rows" in new:
        return gaps_of_rows(old, new)
    if not holds_models(new):
        return []
    kept = {entry["model"]: entry for entry in (old or {}).get("results", ())}
    said = []
    for entry in new["results"]:
        if why := why_not_kept(entry, kept.pop(entry["model"], None), part(new) or ""):
            said.append(f"{entry['model']}: {why}")
    if kept:
        said.append(f"without {', '.join(kept)}, which what is kept has")
    return said or ([] if new["results"] else ["no models"])


def gaps_of_rows(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """The same of stacks."""
    measured = {(row["mode"], row["layers"]): row for row in new["rows"]}
    kept = {(row["mode"], row["layers"]): row for row in (old or {}).get("rows", ())}
    said = [] if measured else ["no rows"]
    for key in measured | kept:
        arms = list(kept[key]["us"]) if key in kept else ["cgpass"]
        lost = [name for name in arms if name not in measured.get(key, {"us": {}})["us"]]
        place = f"{key[0]}, {key[1]} layers"
        if key not in measured:
            said.append(f"without {place}, which what is kept has")
        elif lost:
            said.append(f"{place}: without {', '.join(lost)}")
    return said


def put_into(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Results of a few models in the place of those that are kept, each with the commit and command of its own."""
    if not holds_models(new):
        raise SystemExit(f"{part(new)}: holds no models")
    for key in ("kind", "torch", "gpu", "driver"):
        before, now = ({**facts(data), **data}[key] for data in (old, new))
        if before != now:
            raise SystemExit(f"{key}: {now} is not put into results with {before}")
    for entry in new["results"]:
        kept = next((each for each in old["results"] if each["model"] == entry["model"]), None)
        if why := why_not_kept(entry, kept, part(new) or ""):
            raise SystemExit(f"{part(new)}, {entry['model']}: {why}")
    own = {key: new["meta"][key] for key in ("commit", "command", "time")}
    entries = {entry["model"]: entry for entry in old["results"]}
    entries |= {entry["model"]: entry | own for entry in new["results"]}
    return with_left_out(old | {"results": list(entries.values())}, old.get("left_out", []))


def taken(places: list[Path], given: str) -> Results:
    """Results ready to be kept, by part."""
    found = found_in(places)
    commit = one_commit([data for runs in found.values() for data in runs], given)
    results = {}
    for name, runs in found.items():
        data = merged(runs)
        noted = facts(data)
        noted["commit"] = commit
        if "command" in noted:
            noted["command"] = command_text(noted["command"])
        results[name] = without_paths(data)
    names = {machine(data) for data in results.values()}
    if len(names) > 1:
        raise SystemExit(f"results of different machines: {', '.join(sorted(names))}")
    return results


def store(results: Results, directory: Path, *, into: bool = False) -> list[Path]:
    """Writes them, and says which files; nothing is written where one of them is refused.

    Models stay in the order that an older result has.

    Args:
        results: By part.
        directory: Of what is kept.
        into: Whether models that were not measured stay as they are kept. See `put_into`.
    """
    texts = {}
    for name, data in results.items():
        path = directory / f"{name}-{machine(data)}.json"
        old = json.loads(path.read_text()) if path.exists() else None
        if into and old is None:
            raise SystemExit(f"no older {path.name} into which models could be put")
        # Files of tests that were left out have been judged: see benchlib.check.
        if not into and data.get("left_out") and name not in TESTS:
            jobs = ", ".join(data["left_out"])
            raise SystemExit(
                f"{name}: left out, out of time: {jobs}; measure them, too, or keep what there is of them with --into"
            )
        if not into and (said := gaps(old, data)):
            raise SystemExit(f"{name}: not whole: {'; '.join(said)}")
        texts[path] = json.dumps(arranged(old, data, into=into), indent=1) + "\n"
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


def arranged(old: dict[str, Any] | None, new: dict[str, Any], *, into: bool) -> dict[str, Any]:
    """A result as it is kept: models in the order of the older one, and with all of its models where asked for."""
    if old is None:
        return new
    if into:
        new = put_into(old, new)
    if not holds_models(new):
        return new
    known = [model["model"] for model in old["results"]]

    def place(model: dict[str, Any]) -> int:
        return known.index(model["model"]) if model["model"] in known else len(known)

    return new | {"results": sorted(new["results"], key=place)}
