"""What got worse: against the baseline of the same run, or between two results.

Machines differ between runs, so times of cgpass are judged by their ratio to another arm of the same run: the first of
RIVALS that both results have. A figure may grow by the tolerance and by half of what single calls vary by (from the median
to the nearer of the tenth and the ninetieth percentile), a fifth at most.
"""

import math
from typing import Any

from benchlib import report
from benchlib.arms import BASELINE, is_ours
from benchlib.report import differs

Entry = dict[str, Any]
Figure = tuple[float, float]
"""A median, and the part of it by which medians vary."""
TIMES = ("step_ms", "loop_ms", "host_ms", "cold_s", "warm_s")
MEMORY = "peak_reserved_bytes"
RIVALS = (  # the best first
    *("limit", "limit-step", "torch-graphed", "reduce-overhead", "default", "eager"),
)
MOST_VARIATION = 0.2


def figure(arms: dict[str, Entry], name: str, key: str) -> Figure | None:
    """Return a quantity of an arm, and by what part of it medians vary."""
    found = arms.get(name, {}).get(key)
    if not isinstance(found, dict):
        return (found, 0.0) if found else None
    middle = found["median"]
    nearer = min(found.get("p90", middle) - middle, middle - found.get("p10", middle))
    return (middle, nearer / 2 / middle) if middle else None


def is_worse(old: Figure, new: Figure, tolerance: float) -> bool:
    """Return whether a figure grew by more than `tolerance` percent and what medians vary by."""
    varies = min(math.hypot(old[1], new[1]), MOST_VARIATION)
    return new[0] > old[0] * (1 + tolerance / 100 + varies)


def problems(data: Entry) -> list[str]:
    """Return what makes a result none: models left out, arms of cgpass that failed, differ or have no figures."""
    said = [f"left out, out of time: {each}" for each in data.get("left_out", ())]
    said += [] if data["results"] else ["no results"]
    for model in data["results"]:
        for name, entry in model["arms"].items():
            error = (entry | entry.get("check", {})).get("error")
            if not is_ours(name):
                continue
            where = f"{model['title']}, {model['mode']}, {name}"
            if error is not None:
                said.append(f"{where}: failed: {report.one_line(error)}")
            elif differs(entry):
                said.append(f"{where}: results differ")
            elif not entry.keys() & {*TIMES, MEMORY, "activation_mib"}:
                said.append(f"{where}: no figures")
    return said


def judged(
    old: dict[str, Entry], new: dict[str, Entry], name: str, rivals: tuple[str, ...]
) -> dict[str, tuple[Figure, Figure]]:
    """Return what an arm of cgpass is judged by, before and now: times relative to a rival's, and memory."""
    found = {}
    for key in (*TIMES, MEMORY):
        ours = [figure(arms, name, key) for arms in (old, new)]
        if not all(ours):
            continue
        if key == MEMORY or not rivals:
            found[key] = tuple(ours)
        for rival in rivals if key != MEMORY else ():
            theirs = [figure(arms, rival, key) for arms in (old, new)]
            has_host_time = key != "host_ms" or not rival.startswith("limit")
            sound = not any(differs(arms.get(rival, {})) for arms in (old, new))
            if all(theirs) and has_host_time and sound:
                pairs = zip(ours, theirs, strict=True)
                found[f"{key} / {rival}'s"] = tuple(
                    (a[0] / b[0], math.hypot(a[1], b[1])) for a, b in pairs
                )
                break
    return found


def slower_than_baseline(data: Entry, tolerance: float) -> list[str]:
    """Return where an arm takes more time or memory than the same arm of the other checkout, in the same run."""
    said = []
    for model in data["results"]:
        arms = model["arms"]
        old = {name.removesuffix(BASELINE): arms[name] for name in arms if BASELINE in name}
        for name in filter(is_ours, arms):
            for what, (then, this) in judged(old, arms, name, ()).items():
                if is_worse(then, this, tolerance):
                    part = f"{this[0] / then[0]:.3f} of the baseline's"
                    said.append(f"{model['title']}, {model['mode']}, {name}: {what} {part}")
    return said


def compare(old: Entry, new: Entry, tolerance: float) -> tuple[str, list[str]]:
    """Return a table of what changed for arms of cgpass, and what got worse; nothing to judge is worse, too.

    Models are the same where their titles are, which name batches and whether they are tiny.
    """
    then_of = {(model["mode"], model["title"]): model["arms"] for model in old["results"]}
    rows, worse = [], []
    for model in new["results"]:
        then_arms, place = then_of.get((model["mode"], model["title"]), {}), model["title"]
        for name in filter(is_ours, model["arms"]):
            figures = judged(then_arms, model["arms"], name, RIVALS)
            for what, (then, this) in figures.items():
                bad = is_worse(then, this, tolerance)
                change = f"{then[0]:.4g} -> {this[0]:.4g} ({100 * (this[0] / then[0] - 1):+.1f} %)"
                rows.append([place, model["mode"], name, what, change, "**worse**" * bad])
                worse += [f"{place}, {model['mode']}, {name}: {what} {change}"] * bad
    if not rows:
        worse.append("nothing to compare: no model and arm of cgpass that both results have")
    return report.table(["model", "mode", "arm", "figure", "before -> now", "note"], rows), worse
