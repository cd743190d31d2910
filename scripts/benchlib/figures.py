"""Figures of results: of each model or depth, by quantity and arm, with what they vary by."""

import math
from dataclasses import dataclass
from typing import Any

TIMES = {"step_ms": "step ms", "loop_ms": "loop ms", "host_ms": "host ms"}

MOST_VARIATION = 0.2
"""Part of a ratio: what grew by more is looked at, however calls vary."""


@dataclass(frozen=True)
class Figure:
    """A median, and the part of it by which medians vary; nothing is known of that where calls are not told.

    That is taken to be half of what calls vary by, to the nearer side: a few slow calls move no median.
    """

    median: float
    varies: float = 0.0

    @classmethod
    def of(cls, found: float | dict[str, float]) -> "Figure":
        if not isinstance(found, dict):
            return cls(found)
        median = found["median"]
        nearer = min(found.get("p90", median) - median, median - found.get("p10", median))
        return cls(median, nearer / 2 / median if median else 0.0)

    def __truediv__(self, other: "Figure") -> "Figure":
        return Figure(self.median / other.median, math.hypot(self.varies, other.varies))

    def __bool__(self) -> bool:
        return bool(self.median)


Figures = dict[str, dict[str, Figure]]  # by arm, by quantity


def title(model: dict[str, Any]) -> str:
    return model.get("title", model["model"])


def time_figures(data: dict[str, Any]) -> dict[str, Figures]:
    """Times of each model, by quantity and arm."""
    return {
        title(model): {
            text: {
                name: Figure.of(entry[key])
                for name, entry in model["arms"].items()
                if "median" in entry.get(key, {})
            }
            for key, text in TIMES.items()
        }
        for model in data["results"]
    }


def memory_figures(data: dict[str, Any]) -> dict[str, Figures]:
    """Peak memory of each model, by arm."""
    return {
        title(model): {
            "peak reserved MiB": {
                name: Figure.of(entry["peak_reserved_bytes"] / 2**20)
                for name, entry in model["arms"].items()
                if "peak_reserved_bytes" in entry
            }
        }
        for model in data["results"]
    }


def depth(row: dict[str, Any]) -> str:
    """A stack, and what was done with it."""
    return f"{row['mode']}, {row['layers']} layer{'s' * (row['layers'] != 1)}"


def overhead_figures(data: dict[str, Any]) -> dict[str, Figures]:
    """Microseconds of a call, by mode and layers, and arm."""
    return {
        depth(row): {"us": {name: Figure.of(us) for name, us in row["us"].items()}}
        for row in data["rows"]
    }


FIGURES = {
    "time": time_figures,
    "memory": memory_figures,
    "inference": time_figures,
    "overhead": overhead_figures,
}
