"""Which figures a plot shows, and how to find them in a plot again; benchlib/drawing.py draws.

A plot holds its figures as JSON in its metadata, so that what it shows can be compared with results where there is
nothing to draw with.
"""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchlib.report import sound_arms, sound_row

BARS = ("default", "reduce-overhead", "cgpass")
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def step_figures(data: dict[str, Any]) -> dict[str, Any]:
    """Synchronised steps relative to the limit; models without a limit are named, and arms whose losses differ."""
    models: dict[str, dict[str, float]] = {}
    left_out, differing = [], []
    for model in data["results"]:
        arms = sound_arms(model["arms"])
        steps = {
            name: entry["step_ms"]["median"] for name, entry in arms.items() if "step_ms" in entry
        }
        title = model.get("title", model["model"])
        differing += [
            f"{name} of {title}"
            for name in (*BARS, "limit")
            if name in model["arms"] and name not in arms
        ]
        if "limit" not in steps:
            left_out.append(title)
            continue
        models[title] = {
            name: round(steps[name] / steps["limit"], 2) for name in BARS if name in steps
        }
    found = {"plot": "steps", "models": models, "without_limit": left_out}
    return found | ({"differing": differing} if differing else {})


def overhead_figures(data: dict[str, Any]) -> dict[str, Any]:
    """Host microseconds by mode and arm, as pairs of layers and time; without arms whose results differ."""
    modes: dict[str, dict[str, list[list[float]]]] = {}
    for row in data["rows"]:
        for name, microseconds in sound_row(row)["us"].items():
            lines = modes.setdefault(row["mode"], {})
            lines.setdefault(name, []).append([row["layers"], microseconds])
    differing = [
        f"{name} of {row['mode']}, {row['layers']} layers"
        for row in data["rows"]
        for name in row.get("differs", ())
    ]
    found: dict[str, Any] = {"plot": "overhead", "modes": modes}
    return found | ({"differing": differing} if differing else {})


FIGURES = {"time": step_figures, "overhead": overhead_figures}


def figures(data: dict[str, Any]) -> dict[str, Any]:
    """What the plot of a result shows."""
    if data["kind"] not in FIGURES:
        raise ValueError(f"there is no plot of results of the kind {data['kind']!r}")
    return FIGURES[data["kind"]](data)


def check_argument(parser: argparse.ArgumentParser, path: Path | None, kind: str) -> None:
    """Refuses --plot where there will be none; asked before anything is measured."""
    if path is None:
        return
    if kind not in FIGURES:
        parser.error(f"--plot: there is no plot of results of the kind {kind!r}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot: needs matplotlib, as of pip install -e ".[dev]"')


def shown(path: Path) -> dict[str, Any] | None:
    """The figures that a plot shows; None if there is no such plot, or it doesn't say."""
    try:
        found = ElementTree.parse(path).getroot().find(f".//{DESCRIPTION}")
    except (OSError, ElementTree.ParseError):
        return None
    return None if found is None or not found.text else json.loads(found.text)


def draw(path: Path, what: dict[str, Any]) -> None:
    """Writes a plot; needs matplotlib, which the extra "report" installs."""
    importlib.import_module("benchlib.drawing").draw(path, what)
