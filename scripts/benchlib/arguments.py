"""Types of command line arguments that several scripts have: what is wrong is said before anything is measured."""

import argparse
import math
from collections.abc import Callable, Collection


def count(text: str) -> int:
    """A whole number of at least one."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return value


def count_from_zero(text: str) -> int:
    """A whole number of at least zero."""
    return 0 if text.strip() == "0" else count(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else -1.0


def percent(text: str) -> float:
    """A finite number of at least zero."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def seconds(text: str) -> float:
    """A finite number above zero."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _parts(text: str) -> list[str]:
    parts = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not parts:
        raise argparse.ArgumentTypeError("names nothing")
    return parts


def counts(text: str) -> list[int]:
    """Whole numbers with commas, each once."""
    return [count(part) for part in _parts(text)]


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Names with commas, each once, of those that there are."""

    def parse(text: str) -> list[str]:
        parts = _parts(text)
        unknown = ", ".join(part for part in parts if part not in known)
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(known)}")
        return parts

    return parse
