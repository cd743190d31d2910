"""Results as Markdown tables and as a plot, and what is wrong with them."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

from benchlib.arms import BASELINE, is_ours

Entry = dict[str, Any]
COLOURS = {
    "default": "#9a9a9a",
    "reduce-overhead": "#d08a2e",
    "cgpass": "#2f8fd6",
    "cgpass-step": "#3aa67a",
}
INK = "#7a7a7a"
COMPARED = ("step_ms", "loop_ms", "host_ms", "cold_s", "warm_s", "peak_reserved_bytes")
"""Figures compared between checkouts."""
TEXTS = {
    "train": "Training steps.",
    "inference": "Calls without gradients, in eval mode.",
    "start": "Seconds from `torch.compile` to the end of the third step, with nothing cached and in a second process.",
}


def number(value: float | None, digits: int = 2) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns without any value are left out."""
    rows = [[cell or "-" for cell in row] for row in rows]
    kept = [n for n in range(len(head)) if n < 2 or any(row[n] != "-" for row in rows)]
    lines = [[row[n] for n in kept] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def value(entry: Entry, key: str) -> float | None:
    """Return a quantity of an arm, a median or a single figure; None where it was not measured."""
    found = entry.get(key)
    return found.get("median") if isinstance(found, dict) else found


def differs(entry: Entry) -> bool:
    """Return whether an arm computes something else than it has to."""
    check = entry.get("check", {})
    return not check.get("equal", check.get("close", True))


def one_line(text: str) -> str:
    return " ".join(text.split())[:110].replace("|", "/")


def note(entry: Entry) -> str:
    """Return what is to be said of an arm: its error, or how its results compare."""
    check, said = entry.get("check", {}), []
    if "error" in entry:
        said.append(f"failed: {one_line(entry['error'])}")
    elif "error" in check:
        said.append(f"**not compared**: {one_line(check['error'])}")
    elif differs(entry):
        ours = "**results differ**"
        said.append(ours if "equal" in check else "other losses, as of other random numbers")
    elif "equal" in check:
        said.append("bitwise equal" + " (deterministic)" * bool(check.get("deterministic")))
    said += ["destroy_process_group never returned"] * (entry.get("process_group_ended") is False)
    return "; ".join(said)


def _figure(key: str, digits: int = 2, times: float = 1.0) -> Callable[[Entry], str]:
    def cell(entry: Entry) -> str:
        found = value(entry, key)
        return "" if found is None else number(found * times, digits)

    return cell


def _step(entry: Entry) -> str:
    found = entry.get("step_ms", {})
    more = f" ({found['p10']:.2f} to {found['p90']:.2f})" if "p10" in found else ""
    return number(found.get("median")) + more


def _copied(entry: Entry) -> str:
    counts = entry.get("per_step")
    return number(counts.get("copied_bytes", 0) / 1024, 1) if counts else ""


def _settled(entry: Entry) -> str:
    found = entry.get("settled")
    return "{recordings} + {plain_calls}, step {steps}".format(**found) if found else ""


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "step ms (p10 to p90)": _step,
    "loop ms": _figure("loop_ms"),
    "host ms": _figure("host_ms", 3),
    "GPU busy ms": _figure("gpu_busy_ms"),
    "cold s": _figure("cold_s"),
    "second process s": _figure("warm_s"),
    "peak reserved MiB": _figure("peak_reserved_bytes", 0, 2**-20),
    "peak allocated MiB": _figure("peak_allocated_bytes", 0, 2**-20),
    "activations MiB": _figure("activation_mib", 0),
    "partitions captured/eager": lambda entry: "/".join(map(str, entry.get("partitions", ()))),
    "copied KiB/step": _copied,
    "recordings + plain calls": _settled,
    "note": note,
}


def with_baseline(results: list[Entry]) -> Iterator[tuple[Entry, str, Entry, Entry]]:
    """Yield the arms of which another checkout's were measured: model, name, what those took, and these."""
    for model in results:
        for name, entry in model["arms"].items():
            if theirs := model["arms"].get(name + BASELINE):
                yield model, name, theirs, entry


def against_baseline(results: list[Entry]) -> str:
    """Return ratios of arms to the same arm of another checkout, as a table; empty if there are none."""
    rows = []
    for model, name, then, now in with_baseline(results):
        pairs = [(value(now, key), value(then, key)) for key in COMPARED]
        ratios = [number(a / b, 3) if a and b else "" for a, b in pairs]
        rows += [[model["title"], name, *ratios]] if any(ratios) else []
    heads = [key.rpartition("_")[0].replace("_", " ") for key in COMPARED]
    return table(["this / baseline", "arm", *heads], rows) if rows else ""


def render(data: Entry) -> str:
    """Return all results as Markdown."""
    meta = data["meta"]
    baseline = f", baseline {meta['baseline']}" if "baseline" in meta else ""
    on = f"torch {meta['torch']}, {meta['gpu']}, driver {meta['driver']}, commit {meta['commit']}"
    blocks = [f"{on}{baseline}.\nCommand: `{meta['command']}`.\n"]
    if data.get("left_out"):
        blocks.append(f"**Left out, out of time: {'; '.join(data['left_out'])}.**\n")
    for mode, text in TEXTS.items():
        if results := [model for model in data["results"] if model["mode"] == mode]:
            rows = [
                [model["title"], name, *(column(entry) for column in COLUMNS.values())]
                for model in results
                for name, entry in model["arms"].items()
            ]
            shown = table(["model", "arm", *COLUMNS], rows)
            blocks += [f"{text}\n", shown, against_baseline(results)]
    return "\n".join(filter(None, blocks))


def drawn(model: Entry) -> dict[str, float]:
    """Return how long steps take in the arms that have a colour."""
    arms = {name: model["arms"].get(name, {}) for name in COLOURS}
    times = {name: value(entry, "step_ms") for name, entry in arms.items() if not differs(entry)}
    return {name: ms for name, ms in times.items() if ms}


def plot(data: Entry) -> str:
    """Return horizontal bars as SVG: training steps relative to the limit."""
    found = {}
    for model in data["results"]:
        limit = value(model["arms"].get("limit", {}), "step_ms")
        if model["mode"] == "train" and limit and (times := drawn(model)):
            found[model["title"]] = {name: round(ms / limit, 2) for name, ms in times.items()}
    scale = 480 / max((v for each in found.values() for v in each.values()), default=1.0)
    y, parts = 34, [text(0, 14, "step time / limit"), *legend(found.values())]
    for title, each in found.items():
        parts.append(text(240, y + 7 * len(each) + 3, title, "end"))
        for name, ratio in each.items():
            parts.append(bar(250, y, ratio * scale, name))
            parts.append(text(256 + ratio * scale, y + 9, f"{ratio:.2f}"))
            y += 14
        y += 8
    parts.append(line(f"M{250 + scale:.1f} 28V{y}"))
    return svg(790, y + 4, parts)


def curves(data: Entry) -> str:
    """Return step time over depth as SVG, a panel a width, both axes logarithmic.

    The networks are `mlp_WIDTHxDEPTH`, which differ in nothing else; empty if none was measured.
    """
    found: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for model in data["results"]:
        if size := re.fullmatch(r"mlp_(\d+)x(\d+)", model["model"]):
            width, depth = map(int, size.groups())
            for name, ms in drawn(model).items():
                found.setdefault(width, {}).setdefault(name, []).append((depth, ms))
    points = [point for each in found.values() for some in each.values() for point in some]
    if not points:
        return ""
    depths, times = zip(*points, strict=True)
    ticks = [n * 10.0**power for power in range(-3, 4) for n in (1, 2, 5)]
    ticks = [ms for ms in ticks if min(times) / 2.5 < ms < max(times) * 2.5]

    def x(depth: int, left: float) -> float:
        return left + 180 * logarithmic(depth, min(depths), max(depths))

    def y(ms: float) -> float:
        return 270 - 220 * logarithmic(ms, ticks[0], ticks[-1])

    parts = [text(0, 14, "step, ms"), *legend(found.values())]
    for n, (width, arms) in enumerate(sorted(found.items())):
        left = 60 + 245 * n
        parts.append(text(left + 90, 40, f"layers of {width}", "middle"))
        for ms in ticks:
            parts += [line(f"M{left} {y(ms):.1f}h180"), text(left - 6, y(ms) + 4, f"{ms:g}", "end")]
        parts += [text(x(depth, left), 290, str(depth), "middle") for depth in sorted({*depths})]
        for name, some in arms.items():
            path = "L".join(f"{x(depth, left):.1f} {y(ms):.1f}" for depth, ms in sorted(some))
            look = f'fill="none" stroke="{COLOURS[name]}" stroke-width="2"'
            parts.append(f'<path d="M{path}" {look}/>')
    return svg(max(790, 60 + 245 * len(found)), 312, [*parts, text(60, 308, "layers")])


def logarithmic(value: float, first: float, last: float) -> float:
    """Return where a value lies on a logarithmic axis, as a part of its length."""
    return math.log(value / first) / math.log(last / first) if first < last else 0.0


def text(x: float, y: float, said: str, anchor: str = "") -> str:
    more = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{INK}"{more}>{escape(said)}</text>'


def bar(x: float, y: float, width: float, name: str) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="11"'
    return f'<rect {place} fill="{COLOURS[name]}"/>'


def line(path: str) -> str:
    return f'<path d="{path}" stroke="{INK}" stroke-dasharray="3"/>'


def legend(found: Iterable[Iterable[str]]) -> list[str]:
    names = set().union(*found)
    places = [(250 + 135 * n, name) for n, name in enumerate(c for c in COLOURS if c in names)]
    return [part for x, name in places for part in (bar(x, 5, 11, name), text(x + 16, 14, name))]


def svg(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a picture without a background, in colours that are read on white as on black."""
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', *parts, "</svg>", ""])


# ---- what is wrong

MOST_VARIATION = 0.2


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
                said.append(f"{where}: failed: {one_line(error)}")
            elif differs(entry):
                said.append(f"{where}: results differ")
            elif not entry.keys() & {*COMPARED, "activation_mib"}:
                said.append(f"{where}: no figures")
    return said


def _variation(entry: Entry, key: str) -> float:
    """Return the part of a median by which medians vary: half of what single calls do, on the nearer side."""
    found = entry.get(key)
    if not isinstance(found, dict) or not found["median"]:
        return 0.0
    middle = found["median"]
    return min(found["p90"] - middle, middle - found["p10"]) / 2 / middle


def slower_than_baseline(data: Entry, tolerance: float) -> list[str]:
    """Return where an arm takes more time or memory than the same arm of the other checkout, in the same run.

    It may take more by `tolerance` percent, and by what medians vary, a fifth at most.
    """
    said = []
    for model, name, *pair in with_baseline(data["results"]):
        for key in COMPARED:
            then, now = (value(entry, key) for entry in pair)
            varies = min(math.hypot(*(_variation(each, key) for each in pair)), MOST_VARIATION)
            if then and now and now > then * (1 + tolerance / 100 + varies):
                where = f"{model['title']}, {model['mode']}, {name}"
                said.append(f"{where}: {key} {now / then:.3f} of the baseline's")
    return said
