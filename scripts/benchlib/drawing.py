"""Draws plots as SVG with matplotlib: no background and colours that are read on white as on black."""

import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter, NullLocator

INK = "#7a7a7a"
COLOURS = {
    "eager": "#a0699a",
    "default": "#9a9a9a",
    "reduce-overhead": "#d08a2e",
    "cgpass": "#2f8fd6",
    "cgpass-direct": "#3aa67a",
    "limit": INK,
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cgpass",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def wrapped(title: str) -> str:
    """A model's title in lines: the batch below the name."""
    name, _, rest = title.partition(", ")
    return "\n".join([*textwrap.wrap(name, 18), *textwrap.wrap(rest, 18)])


def note_what_is_left_out(figure: Figure, what: dict[str, Any]) -> None:
    """Says below a plot what it doesn't show, and why."""
    reasons = {"without_limit": "no limit", "differing": "values differ"}
    said = [
        f"{reason}, so not shown: {'; '.join(what[key])}"
        for key, reason in reasons.items()
        if what.get(key)
    ]
    if said:
        figure.supxlabel("\n".join(said), fontsize=9, color=INK)


def draw_steps(figure: Figure, what: dict[str, Any]) -> None:
    """Bars per model, relative to the limit."""
    models: dict[str, dict[str, float]] = what["models"]
    figure.set_size_inches(9.5, 4.4)
    axes = figure.subplots()
    names = [name for name in COLOURS if any(name in ratios for ratios in models.values())]
    width = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        at = [i + (n - (len(names) - 1) / 2) * width for i in range(len(models))]
        heights = [ratios.get(name, 0.0) for ratios in models.values()]
        bars = axes.bar(at, heights, width * 0.92, label=name, color=COLOURS[name])
        labels = [f"{height:.2f}" if height else "-" for height in heights]
        axes.bar_label(bars, labels, padding=2, fontsize=9, color=INK)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(models)), [wrapped(title) for title in models])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("step time / limit")
    axes.legend(ncols=len(names), loc="upper left", bbox_to_anchor=(0, 1.12))
    note_what_is_left_out(figure, what)


def draw_lines(axes: Axes, lines: dict[str, list[list[float]]]) -> None:
    """Microseconds over layers, a line per arm."""
    for name, points in lines.items():
        layers, microseconds = zip(*points, strict=True)
        axes.plot(layers, microseconds, marker="o", label=name, color=COLOURS.get(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="y", color=INK, alpha=0.3, linewidth=0.6)
    ticks = sorted({layers for points in lines.values() for layers, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("layers")


def draw_overhead(figure: Figure, what: dict[str, Any]) -> None:
    """A panel per mode."""
    modes: dict[str, Any] = what["modes"]
    figure.set_size_inches(9.5, 4.2)
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    for axes, (mode, lines) in zip(panels, modes.items(), strict=True):
        draw_lines(axes, lines)
        axes.set_title(mode, color=INK, fontsize=11)
    panels[0].set_ylabel("host microseconds a call")
    note_what_is_left_out(figure, what)
    arms: dict[str, Any] = {}  # not all are in each
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        arms = dict(zip(labels, handles, strict=True)) | arms
    figure.legend(list(arms.values()), list(arms), ncols=len(arms), loc="outside upper center")


def draw(path: Path, what: dict[str, Any]) -> None:
    """Writes the plot of figures that benchlib/plots.py chose, with the figures in it."""
    with rc_context(STYLE):
        figure = Figure(layout="constrained")
        if what.get("models") or what.get("modes"):
            {"steps": draw_steps, "overhead": draw_overhead}[what["plot"]](figure, what)
        else:
            note_what_is_left_out(figure, what)
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {"Date": None, "Description": json.dumps(what)} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, metadata=noted)
    if path.suffix == ".svg":
        lines = [line.rstrip() for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
