"""What got worse: against the baseline of the same run, or between two results.

Machines differ between runs, so times of cgpass are judged by their ratio to another arm of the same run: the first of
RIVALS that both results have. A ratio may grow by the tolerance and by half of what single calls vary by (from the median
to the nearer of the tenth and the ninetieth percentile), a fifth at most; peak memory by the tolerance.
"""

import math
from typing import Any

from benchlib import report
from benchlib.arms import BASELINE, is_ours
from benchlib.report import differs

Entry = dict[str, Any]
Figure = tuple[float, float]
"""A median, and the part of it by which medians vary."""
TIMES = ("step_ms", "loop_ms", "host_ms")
RIVALS = (
    "limit",
    "limit-step",
    "limit-eager",
    "torch-graphed",
    "reduce-overhead",
    "default",
    "eager",
)
MOST_VARIATION = 0.2


def figure(entry: Entry, key: str) -> Figure | None:
    """Return a quantity of an arm, and by what part of it medians vary."""
    found = entry.get(key)
    if not isinstance(found, dict):
        return (found, 0.0) if found else None
    middle = found["median"]
    nearer = min(found.get("p90", middle) - middle, middle - found.get("p10", middle))
    return (middle, nearer / 2 / middle) if middle else None


def ratio(one: Figure, other: Figure) -> Figure:
    return one[0] / other[0], math.hypot(one[1], other[1])


def is_worse(old: Figure, new: Figure, tolerance: float) -> bool:
    """Return whether a figure grew by more than `tolerance` percent and what medians vary by."""
    varies = min(math.hypot(old[1], new[1]), MOST_VARIATION)
    return new[0] > old[0] * (1 + tolerance / 100 + varies)


def with_starts(model: Entry) -> dict[str, Entry]:
    """Return a model's arms, first steps in two figures more, cold and warm."""
    arms = model["arms"]
    if model["mode"] != "start":
        return arms
    count = report.until_replays(arms["cgpass"]) if "cold" in arms.get("cgpass", {}) else 1
    return {
        name: entry
        | {
            "cold_s": report.first_steps_s(entry, "cold", count),
            "warm_s": report.first_steps_s(entry, "warm", 1),
        }
        for name, entry in arms.items()
    }


def problems(data: Entry) -> list[str]:
    """Return what makes a result none: models left out, arms of cgpass that failed, differ or have no figures."""
    said = [f"left out, out of time: {each}" for each in data.get("left_out", ())]
    if not data["results"]:
        said.append("no results")
    for model in data["results"]:
        for name, entry in model["arms"].items():
            if not is_ours(name):
                continue
            where = f"{model['title']}, {model['mode']}, {name}"
            if "error" in entry or "error" in entry.get("check", {}):
                said.append(
                    f"{where}: failed: {report.one_line((entry | entry.get('check', {}))['error'])}"
                )
            elif differs(entry):
                said.append(f"{where}: results differ")
            elif not entry.keys() & {*TIMES, "cold", "peak_reserved_bytes", "activation_mib"}:
                said.append(f"{where}: no figures")
    return said


def slower_than_baseline(data: Entry, tolerance: float) -> list[str]:
    """Return where an arm takes more time or memory than the same arm of the other checkout, in the same run."""
    said = []
    for model in data["results"]:
        found = with_starts(model)
        for name in filter(is_ours, found):
            for key in (*TIMES, "cold_s", "warm_s", "peak_reserved_bytes"):
                new, old = (figure(found.get(n, {}), key) for n in (name, name + BASELINE))
                if old and new and is_worse(old, new, tolerance):
                    part = f"{new[0] / old[0]:.3f} of the baseline's"
                    said.append(f"{model['title']}, {model['mode']}, {name}: {key} {part}")
    return said


def only(data: Entry, wanted: list[tuple[str, str]]) -> Entry:
    """Return a result with these models alone, by mode and name: others are not missing."""
    kept = [each for each in data["results"] if (each["mode"], each["model"]) in wanted]
    return data | {"results": kept}


def judged(
    old: dict[str, Entry], new: dict[str, Entry], name: str
) -> dict[str, tuple[Figure, Figure]]:
    """Return what an arm of cgpass is judged by, before and now: ratios of times, and memory."""
    found = {}
    for key in (*TIMES, "cold_s", "warm_s"):
        for rival in RIVALS:
            if key == "host_ms" and rival.startswith("limit"):
                continue  # it has no host time to speak of
            each = [figure(arms.get(n, {}), key) for arms in (old, new) for n in (name, rival)]
            if all(each) and not any(differs(arms[rival]) for arms in (old, new)):
                ours_then, theirs_then, ours_now, theirs_now = each
                found[f"{key} / {rival}'s"] = (
                    ratio(ours_then, theirs_then),
                    ratio(ours_now, theirs_now),
                )
                break
    key = "peak_reserved_bytes"
    memory = [figure(arms.get(name, {}), key) for arms in (old, new)]
    if all(memory):
        found["peak reserved MiB"] = tuple((value / 2**20, 0.0) for value, _ in memory)
    return found


def compare(old: Entry, new: Entry, tolerance: float) -> tuple[str, list[str]]:
    """Return a table of what changed for arms of cgpass, and what got worse; nothing to judge is worse, too."""
    if old["meta"].get("tiny", False) != new["meta"].get("tiny", False):
        return "", ["nothing to compare: one of the results is of tiny models"]
    now = {(model["mode"], model["model"]): model for model in new["results"]}
    rows, worse = [], []
    for before in old["results"]:
        after = now.get((before["mode"], before["model"]), {"title": "", "arms": {}})
        place = f"{before['title']}, {before['mode']}"
        for name in filter(is_ours, before["arms"]):
            if name not in after["arms"] or before["title"] != after["title"]:
                continue  # arms are chosen by the command; a title names what is measured
            figures = judged(with_starts(before), with_starts(after), name)
            for what, (then, this) in figures.items():
                bad = is_worse(then, this, tolerance)
                change = f"{then[0]:.3f} -> {this[0]:.3f} ({100 * (this[0] / then[0] - 1):+.1f} %)"
                rows.append([place, name, what, change, "**worse**" if bad else ""])
                if bad:
                    worse.append(f"{place}, {name}: {what} {change}")
    if not rows:
        worse.append("nothing to compare: no model and arm of cgpass that both results have")
    return report.table(["model", "arm", "figure", "before -> now", "note"], rows), worse
