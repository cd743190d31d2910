"""What changed between two results of one script.

Machines differ between runs, so times of cgpass are judged by their ratio to another arm of the same run, and
memory by itself. That arm is the one that is most like it: the limit, else reduce-overhead, else default. The host's time
is a part of a step, and of one in default nearly all: on a faster host the ratio to that grows though nothing got slower.

A regression is a ratio, or memory, that grew by more than the tolerance, and a ratio by more than that and what medians of
calls vary by (`figures.Figure`), a fifth at most; losses of cgpass that differ, or were not compared, or cgpass
failing, where an older result had nothing of it; and any model or arm having been measured that is not now, or not with the
same losses any more: what cgpass is judged by belongs to a result, too.
"""

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchlib import arguments, report, shape
from benchlib.figures import FIGURES, MOST_VARIATION, Figure, Figures, depth, title
from benchlib.report import differs, ours, sound_arms

Rows = dict[tuple[str, str], dict[str, str]]  # model and arm -> text, by quantity
# What is measured of every arm, by kind, or one of it in older results; nothing where it was only compiled.
MEASURED = {
    "time": ("step_ms",),
    "memory": ("peak_reserved_bytes",),
    "inference": ("host_ms", "step_ms"),
    "compiled": ("losses",),
}


@dataclass
class Comparison:
    """Rows of two tables, and what got worse by more than `tolerance` percent."""

    tolerance: float
    unsound_before: set[tuple[str, str]] = field(default_factory=set)
    unsound_now: set[tuple[str, str]] = field(default_factory=set)
    changes: Rows = field(default_factory=dict)
    ratios: Rows = field(default_factory=dict)
    judged: int = 0
    varied: int = 0
    """Of the judged ones, those that grew no more than medians vary."""
    worse: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def judge(self, what: str, old: Figure, new: Figure) -> str:
        """Counts a figure that is to stay, and says whether it did."""
        self.judged += 1
        allowed = self.tolerance / 100
        if new.median <= old.median * (1 + allowed):
            return ""
        varies = min(math.hypot(old.varies, new.varies), MOST_VARIATION)
        if new.median <= old.median * (1 + allowed + varies):
            self.varied += 1
            return ", as calls vary"
        self.worse.append(f"{what}: {changed(old, new)}")
        return " **worse**"


def result(kinds: Collection[str], *, shown: bool) -> Callable[[str], dict[str, Any]]:
    """What is in a file of one of these kinds, which may be shown, too; asked for before anything is measured."""

    def read(name: str) -> dict[str, Any]:
        try:
            data = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"no JSON in {name}: {error}") from error
        found = kind(data) if isinstance(data, dict) else "unknown"
        if found not in kinds:
            known = " or ".join(kinds)
            raise argparse.ArgumentTypeError(f"{name}: results of kind {found}, not of {known}")
        try:
            shape.check(data)
            if shown:
                report.render(data)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{name}: not all of a result: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise argparse.ArgumentTypeError(f"{name}: not all of a result: {error!r}") from error
        return data

    return read


def add_arguments(parser: argparse.ArgumentParser, kinds: Collection[str]) -> None:
    """The options of every script that compares; of a script whose results are of these kinds."""
    add, old, new = parser.add_argument, result(kinds, shown=False), result(kinds, shown=True)
    add("--compare", type=old, metavar="OLD", help="JSON of an older run; status 1 if worse")
    add("--from", dest="source", type=new, metavar="NEW", help="measure nothing, read this JSON")
    add(
        "--tolerance",
        type=arguments.percent,
        default=5.0,
        help="percent by which a ratio may grow (5)",
    )


def check_arguments(
    parser: argparse.ArgumentParser, args: argparse.Namespace, measured: str
) -> None:
    """Refuses an older result of another kind than what is to be measured, or read."""
    now = kind(args.source) if args.source else measured
    if args.compare and kind(args.compare) != now:
        parser.error(f"--compare: results of kind {kind(args.compare)}, but of {now} now")
    tiny = shape.is_tiny(args.source) if args.source else getattr(args, "tiny", False)
    if args.compare and shape.is_tiny(args.compare) != tiny:
        sizes = ("tiny", "full")[:: 1 if tiny else -1]
        parser.error(f"--compare: results of {sizes[1]} models, but of {sizes[0]} ones now")


def kind(data: dict[str, Any]) -> str:
    """What was measured: time, memory, inference or overhead."""
    return data.get("kind", "unknown")


def changed(old: Figure | None, new: Figure | None, digits: int = 2) -> str:
    """Two figures, and by how much the second differs."""
    shown = ("-" if value is None else f"{value.median:.{digits}f}" for value in (old, new))
    percent = f" ({100 * (new.median / old.median - 1):+.1f} %)" if old and new else ""
    return " -> ".join(shown) + percent


def rivals(found: str, quantity: str) -> tuple[str, ...]:
    """The arms that cgpass is set against, those it is judged by first; the limit has no host time to speak of."""
    hosts = ("reduce-overhead", "default")
    return hosts if found == "overhead" or quantity == "host ms" else ("limit", *hosts)


def unsound(data: dict[str, Any]) -> set[tuple[str, str]]:
    """Places and arms that compute something else, by which nothing is judged."""
    found = set()
    for model in data.get("results", ()):
        found |= {(title(model), name) for name in model["arms"].keys() - sound_arms(model["arms"])}
    for row in data.get("rows", ()):
        found |= {(depth(row), name) for name in row.get("differs", ())}
    return found


def compare_ratios(
    found: Comparison, place: str, kind: str, quantity: str, old: Figures, new: Figures
) -> None:
    """Ratios of cgpass to other arms of its own run; the first sound one that there is in both runs is judged."""
    before, after = old.get(quantity, {}), new.get(quantity, {})
    common = [arm for arm in rivals(kind, quantity) if before.get(arm) and after.get(arm)]
    unsound = found.unsound_before | found.unsound_now
    sound = [arm for arm in common if (place, arm) not in unsound]
    judge = sound[0] if sound else None
    for name in ours(before):
        if name not in after:
            continue
        if common and judge is None:
            found.notes.append(f"{place}, {quantity}, {name}: no sound arm to judge it by")
        for arm in common:
            was, now = before[name] / before[arm], after[name] / after[arm]
            what, note = f"{name} / {arm}", ""
            if arm == judge:
                note = found.judge(f"{place}, {quantity}, {what}", was, now)
            cells = found.ratios.setdefault((place, what), {})
            cells[quantity] = changed(was, now, digits=3) + note


def compare_place(found: Comparison, place: str, kind: str, old: Figures, new: Figures) -> None:
    """One model, or one depth and mode."""
    for arm in sorted(name for where, name in found.unsound_now if where == place):
        if (place, arm) not in found.unsound_before and arm in rivals(kind, ""):
            found.worse.append(f"{place}, {arm}: computes something else now, and judges nothing")
    for quantity in old | new:
        before, after = old.get(quantity, {}), new.get(quantity, {})
        for name in before | after:
            note = ""
            what = f"{place}, {quantity}, {name}"
            if name in before and name not in after:
                found.worse.append(f"{what}: measured before, not now")
                note = " **gone**"
            elif kind == "memory" and name in ours(before) and name in after:
                note = found.judge(what, before[name], after[name])
            change = changed(before.get(name), after.get(name), 0 if kind == "memory" else 2)
            found.changes.setdefault((place, name), {})[quantity] = change + note
        if kind != "memory":
            compare_ratios(found, place, kind, quantity, old, new)


def lacks(name: str, entry: dict[str, Any], model: dict[str, Any], kind: str) -> Iterator[str]:
    """What was not found out of an arm of cgpass, by the kind of result; a comparison that failed is told elsewhere."""
    if kind not in MEASURED or "error" in entry or "error" in model:
        return
    if not any(key in entry for key in MEASURED[kind]):
        yield "no figures"
    unchecked = name in report.SAME_KERNELS and not entry.get("check")
    told = differs(entry, model["arms"]) or report.takes_after_cgpass(name, entry, model["arms"])
    if kind != "memory" and unchecked and not told:
        yield "losses not compared bitwise"
    for key in ("stages", "kernels"):
        if "error" in (entry.get(key) or {}):
            yield f"no {key}: {report.one_line(entry[key]['error'])}"


def lacking(data: dict[str, Any]) -> Iterator[str]:
    """What was not found out of arms of cgpass, in results of models."""
    found_out = "compiled" if shape.is_compile_only(data) else kind(data)
    for model in data.get("results", ()):
        if not model["arms"] and "error" not in model:
            yield f"{title(model)}: no arms"
        for name in ours(model["arms"]):
            for what in lacks(name, model["arms"][name], model, found_out):
                yield f"{title(model)}, {name}: {what}"


def flags(data: dict[str, Any]) -> Iterator[str]:
    """What is wrong with arms of cgpass: losses or results that differ, failures, what was not found out of them."""
    yield from lacking(data)
    places = [(title(model), model["arms"]) for model in data.get("results", ())]
    places += [(mode, found["arms"]) for mode, found in data.get("modes", {}).items()]
    for place, arms in places:
        for name in ours(arms):
            if differs(arms[name], arms):
                yield f"{place}, {name}: losses differ"
            if "error" in arms[name]:
                yield f"{place}, {name}: failed"
    for row in data.get("rows", ()):
        for name in ours(row.get("differs", ())):
            yield f"{depth(row)}, {name}: results differ"


def compare(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Comparison:
    """All models, or depths, that both results have."""
    kinds = kind(old), kind(new)
    if kinds[0] != kinds[1] or kinds[0] not in FIGURES:
        raise ValueError(f"results of different kinds: {kinds[0]} before, {kinds[1]} now")
    before, after = (FIGURES[kinds[0]](data) for data in (old, new))
    found = Comparison(tolerance, unsound(old), unsound(new))
    found.notes += [
        f"left out of the {age} result, out of time: {', '.join(data['left_out'])}"
        for age, data in (("older", old), ("newer", new))
        if data.get("left_out")
    ]
    for place in before | after:
        if place not in before:
            found.notes.append(f"{place}: only in the newer result")
            continue
        if place in after:
            compare_place(found, place, kinds[0], before[place], after[place])
        elif any(before[place].values()):
            found.worse.append(f"{place}: measured before, not now")
        else:
            found.notes.append(f"{place}: only in the older result, without figures")
    known = set(flags(old))
    for flag in flags(new):
        if flag in known:
            found.notes.append(f"{flag}, as before")
        else:
            found.worse.append(flag)
    return found


def describe(data: dict[str, Any]) -> str:
    """Machine, versions and commit in a few words."""
    meta = data["meta"]
    return f"torch {meta['torch']}, {meta['gpu']}, commit {meta['commit'] or '?'}"


def table(head: str, rows: Rows) -> list[str]:
    """A row per model and arm, a column per quantity."""
    if not rows:
        return []
    quantities = list(dict.fromkeys(quantity for cells in rows.values() for quantity in cells))
    lines = [f"| | {head} | " + " | ".join(quantities) + " |", "|---" * (2 + len(quantities)) + "|"]
    for names, cells in rows.items():
        figures = [cells.get(quantity, "-") for quantity in quantities]
        lines.append("| " + " | ".join([*names, *figures]) + " |")
    return [*lines, ""]


def render(old: dict[str, Any], new: dict[str, Any], found: Comparison) -> str:
    """The comparison as Markdown."""
    tolerance = found.tolerance
    verdict = f"Worse (tolerance {tolerance:g} %), {len(found.worse)}:"
    if not found.worse:
        but = f" and what calls vary by; {found.varied} grew, within that" * bool(found.varied)
        verdict = f"None of {found.judged} figures is worse by more than {tolerance:g} %{but}."
        if not found.judged:
            verdict = (
                "Nothing to judge: no arm of cgpass that both have, with what it is judged by."
            )
    lines = [
        f"Before: {describe(old)}.",
        f"Now: {describe(new)}.",
        "",
        *table("arm, before -> now", found.changes),
        *table("ratio, before -> now", found.ratios),
        *found.notes,
        verdict,
        *(f"- {what}" for what in found.worse),
    ]
    return "\n".join(lines)


def asked_for(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """The models, or numbers of layers, and arms of a result that the command names: others are not missing."""
    key, name, of, chosen = "results", "model", "arms", getattr(args, "models", None)
    if kind(data) == "overhead":
        key, name, of, chosen = "rows", "layers", "us", args.layers
    arms = getattr(args, "arms", None)
    return data | {
        key: [
            each | {of: {arm: found for arm, found in each[of].items() if not arms or arm in arms}}
            for each in data[key]
            if not chosen or each[name] in chosen
        ]
    }


def against(args: argparse.Namespace, data: dict[str, Any]) -> bool:
    """Prints how a run compares to the one asked for; whether it is worse, or can't be judged."""
    if args.compare is None:
        return False
    old = asked_for(args, args.compare)
    found = compare(old, data, args.tolerance)
    print(render(old, data, found), flush=True)
    return bool(found.worse) or not found.judged
