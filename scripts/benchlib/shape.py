"""Whether a JSON is a whole result of a benchmark: asked before anything is measured."""

import math
from typing import Any

FIGURES = ("step_ms", "loop_ms", "host_ms")
FACTS = ("torch", "gpu", "commit")


def _need(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{where} {what}")


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _check_arm(entry: Any, where: str) -> None:
    _need(isinstance(entry, dict), where, "holds no figures")
    for key in FIGURES:
        if key in entry:
            spread = entry[key] if isinstance(entry[key], dict) else {}
            _need(_is_figure(spread.get("median")), f"{where}, {key}:", "the median is no number")
    key = "peak_reserved_bytes"
    _need(_is_figure(entry.get(key, 1)), f"{where}, {key}:", "is no number")
    for key in ("check", "warmup_counters"):
        _need(isinstance(entry.get(key) or {}, dict), f"{where}, {key}:", "holds nothing")
    found = entry.get("check") or {}
    default = found.get("default", {"equal": True})
    said = isinstance(default, dict) and isinstance(default.get("equal"), bool)
    _need(said, f"{where}, check, default:", "doesn't say whether it is equal")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_model(model: Any, where: str) -> None:
    _need(isinstance(model, dict) and isinstance(model.get("model"), str), where, "has no name")
    where = model["model"]
    _need(isinstance(model.get("title", ""), str), where, "has no title")
    _need(isinstance(model.get("arms"), dict), where, "has no arms")
    for name, entry in model["arms"].items():
        _check_arm(entry, f"{where}, {name}")


def _check_row(row: Any, where: str) -> None:
    known = isinstance(row, dict) and {"mode", "layers"} <= row.keys()
    _need(known, where, "has no mode and layers")
    where = f"{row['mode']}, {row['layers']} layers"
    _need(isinstance(row.get("us"), dict), where, "has no figures")
    for name, value in row["us"].items():
        _need(_is_figure(value), f"{where}, {name}:", "is no number")
    _need(_are_names(row.get("differs", [])), f"{where}, differs:", "is no list of arms")


def check(data: dict[str, Any]) -> None:
    """Refuses what can't be compared with a result.

    Raises:
        ValueError: What is missing, or is no figure.
    """
    facts = data.get("meta")
    _need(isinstance(facts, dict), "it", "doesn't say where it was measured")
    for key in FACTS:
        _need(key in facts and isinstance(facts[key] or "", str), "it", f"doesn't say which {key}")
    key, check_each = (
        ("rows", _check_row) if data["kind"] == "overhead" else ("results", _check_model)
    )
    some = isinstance(data.get(key), list) and (data[key] or key != "rows")
    _need(some, "it", f"has no {key}")
    _need(_are_names(data.get("left_out") or []), "left_out", "is no list of names")
    for number, each in enumerate(data[key]):
        check_each(each, f"{key}[{number}]")


def is_compile_only(data: dict[str, Any]) -> bool:
    """Whether nothing was measured, only compiled and checked; of older results the command says it."""
    facts = data.get("meta", data)
    return (
        bool(facts.get("compile_only")) or "--compile-only" in (facts.get("command") or "").split()
    )


def is_tiny(data: dict[str, Any]) -> bool:
    """Whether models were tiny ones; of older results the command says it."""
    facts = data.get("meta", data)
    return bool(facts.get("tiny")) or "--tiny" in (facts.get("command") or "").split()
