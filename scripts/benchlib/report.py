"""Results as Markdown tables and as a plot."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

Entry = dict[str, Any]
COLOURS = {
    "default": "#9a9a9a",
    "reduce-overhead": "#d08a2e",
    "cgpass": "#2f8fd6",
    "cgpass-step": "#3aa67a",
}
INK = "#7a7a7a"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns without any value are left out."""
    rows = [[cell or "-" for cell in row] for row in rows]
    kept = [n for n in range(len(head)) if n < 2 or any(row[n] != "-" for row in rows)]
    lines = [
        [head[n] for n in kept],
        ["---"] * len(kept),
        *([row[n] for n in kept] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def median(entry: Entry, key: str) -> float | None:
    """Return the median of a quantity of an arm, None where it was not measured."""
    return entry.get(key, {}).get("median")


def differs(entry: Entry) -> bool:
    """Return whether an arm computes something else than it has to."""
    check = entry.get("check", {})
    return not check.get("equal", check.get("close", True))


def one_line(text: str) -> str:
    return " ".join(text.split())[:110].replace("|", "/")


def until_replays(entry: Entry) -> int:
    """Return how many first steps it took until one replayed all that a later one replays."""
    replays = entry["cold"]["replays"]
    steady = [new - old for old, new in zip([0, *replays], replays, strict=False)]
    return next(n for n, count in enumerate(steady, 1) if count == steady[-1])


def first_steps_s(entry: Entry, phase: str, count: int) -> float | None:
    """Return the seconds from `torch.compile` to the end of so many steps."""
    if phase not in entry:
        return None
    return entry[phase]["compile_s"] + sum(entry[phase]["steps_s"][:count])


def _spread(entry: Entry, key: str) -> str:
    found = entry.get(key, {})
    more = f" ({found['p10']:.2f} to {found['p90']:.2f})" if "p10" in found else ""
    return number(found.get("median")) + more


def _mebibytes(entry: Entry, key: str) -> str:
    return number(entry[key] / 2**20, 0) if key in entry else ""


def _settled(entry: Entry) -> str:
    if not (found := entry.get("settled")):
        return ""
    return f"{found['recordings']} + {found['plain_calls']}, step {found['steps']}"


def note(entry: Entry) -> str:
    """Return what is to be said of an arm: its error, or how its results compare."""
    check, said = entry.get("check", {}), []
    if "error" in entry:
        said.append(f"failed: {one_line(entry['error'])}")
    elif "error" in check:
        said.append(f"**not compared**: {one_line(check['error'])}")
    elif differs(entry):
        said.append("**results differ**")
        if check.get("plain_repeatable") is False:
            said.append("so do two runs without graphs")
    elif "equal" in check:
        said.append("bitwise equal" + " (deterministic)" * bool(check.get("deterministic")))
    if entry.get("process_group_ended") is False:
        said.append("destroy_process_group never returned")
    return "; ".join(said)


COLUMNS: dict[str, Callable[[Entry], str]] = {
    "step ms (p10 to p90)": lambda entry: _spread(entry, "step_ms"),
    "loop ms": lambda entry: number(median(entry, "loop_ms")),
    "host ms": lambda entry: number(median(entry, "host_ms"), 3),
    "GPU busy ms": lambda entry: number(entry.get("gpu_busy_ms")),
    "peak reserved MiB": lambda entry: _mebibytes(entry, "peak_reserved_bytes"),
    "peak allocated MiB": lambda entry: _mebibytes(entry, "peak_allocated_bytes"),
    "activations MiB": lambda entry: number(entry.get("activation_mib"), 0),
    "partitions captured/eager": lambda e: "/".join(map(str, e.get("partitions", ()))),
    "copied KiB/step": lambda e: (
        number(e["per_step"].get("copied_bytes", 0) / 1024, 1) if "per_step" in e else ""
    ),
    "recordings + plain calls": _settled,
    "note": note,
}


def rows_of_starts(results: list[Entry]) -> Iterable[list[str]]:
    for model in results:
        ours = model["arms"].get("cgpass", {})
        count = until_replays(ours) if "cold" in ours else 1
        for name, entry in model["arms"].items():
            cold, warm = (first_steps_s(entry, *of) for of in (("cold", count), ("warm", 1)))
            yield [model["title"], name, number(cold), number(warm), note(entry)]


def against_baseline(results: list[Entry]) -> str:
    """Return ratios of arms to the same arm of another checkout, as a table; empty if there are none."""
    keys = ("step_ms", "loop_ms", "host_ms", "peak_reserved_bytes")
    rows = []
    for model in results:
        for name, entry in model["arms"].items():
            if theirs := model["arms"].get(f"{name}@baseline"):
                pairs = [(value(entry, key), value(theirs, key)) for key in keys]
                ratios = [number(a / b, 3) if a and b else "-" for a, b in pairs]
                rows += [[model["title"], name, *ratios]] if set(ratios) != {"-"} else []
    return (
        table(["this / baseline", "arm", "step", "loop", "host", "peak reserved"], rows)
        if rows
        else ""
    )


def value(entry: Entry, key: str) -> float | None:
    """Return a quantity of an arm: a median, or a single figure."""
    found = entry.get(key)
    return found.get("median") if isinstance(found, dict) else found


def render(data: Entry) -> str:
    """Return all results as Markdown."""
    meta = data["meta"]
    baseline = f", baseline {meta['baseline']}" if "baseline" in meta else ""
    head = f"torch {meta['torch']}, {meta['gpu']}, driver {meta['driver']}, commit {meta['commit']}{baseline}.\n"
    blocks = [head + f"Command: `{meta['command']}`.\n"]
    if data.get("left_out"):
        blocks.append(f"**Left out, out of time: {'; '.join(data['left_out'])}.**\n")
    texts = {
        "train": "Training steps.",
        "inference": "Calls without gradients, in eval mode.",
        "start": "Seconds from `torch.compile` until all is replayed, and to the first step of a second process.",
    }
    for mode, text in texts.items():
        results = [model for model in data["results"] if model["mode"] == mode]
        if not results:
            continue
        if mode == "start":
            head, rows = ["cold s", "second process s", "note"], rows_of_starts(results)
        else:
            head = list(COLUMNS)
            rows = [
                [model["title"], name, *(column(entry) for column in COLUMNS.values())]
                for model in results
                for name, entry in model["arms"].items()
            ]
        blocks += [f"{text}\n", table(["model", "arm", *head], rows), against_baseline(results)]
    return "\n".join(filter(None, blocks))


def ratios(data: Entry) -> tuple[str, dict[str, dict[str, float]]]:
    """Return what a plot shows: by model and arm, steps relative to the limit, or host times to reduce-overhead's."""
    trained = [model for model in data["results"] if model["mode"] != "start"]
    of = "limit", "step_ms"
    if not any(value(model["arms"].get(of[0], {}), of[1]) for model in trained):
        of = "reduce-overhead", "host_ms"
    found: dict[str, dict[str, float]] = {}
    for model in trained:
        reference = value(model["arms"].get(of[0], {}), of[1])
        for name in COLOURS:
            entry = model["arms"].get(name, {})
            ours = value(entry, of[1])
            if reference and ours and not differs(entry):
                title = model["title"] + ", inference" * (model["mode"] == "inference")
                found.setdefault(title, {})[name] = round(ours / reference, 2)
    return f"{'step' if of[0] == 'limit' else 'host'} time / {of[0]}", found


def plot(data: Entry) -> str:
    """Return horizontal bars as SVG, without a background and in colours that are read on white as on black."""
    what, found = ratios(data)
    names = [name for name in COLOURS if any(name in each for each in found.values())]
    longest = max((v for each in found.values() for v in each.values()), default=1.0)
    scale, y, parts = 480 / longest, 34, []

    def text(x: float, y: float, said: str, more: str = "") -> None:
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="{INK}"{more}>{escape(said)}</text>')

    def bar(x: float, y: float, width: float, name: str) -> None:
        colour = COLOURS[name]
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="11" fill="{colour}"/>'
        )

    text(0, 14, what)
    for n, name in enumerate(names):
        bar(250 + 135 * n, 5, 11, name)
        text(266 + 135 * n, 14, name)
    for title, each in found.items():
        text(240, y + 7 * len(each) + 3, title, ' text-anchor="end"')
        for name, ratio in each.items():
            bar(250, y, ratio * scale, name)
            text(256 + ratio * scale, y + 9, f"{ratio:.2f}")
            y += 14
        y += 8
    line = 250 + scale
    parts.append(f'<path d="M{line:.1f} 28V{y}" stroke="{INK}" stroke-dasharray="3"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 790 {y + 4}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])
