"""Numbers as reports show them."""

from collections.abc import Sequence

NONE = "-"
"""Stands for what is not known or does not apply."""


def size(num_bytes: int | None) -> str:
    """Bytes with a unit, `1.2 MiB`."""
    if num_bytes is None:
        return NONE
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(amount, 1) >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def milliseconds(ms: float | None) -> str:
    """A time without its unit, with as many digits as mean something."""
    if ms is None:
        return NONE
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"


def share(part: float, whole: float) -> str:
    """A percentage that says 100% only of everything, and 0% only of nothing."""
    if not whole:
        return NONE
    percent = 100 * part / whole
    shown = f"{percent:.1f}"
    if part < whole and shown == "100.0":
        return "99.9%"
    if part and shown == "0.0":
        return "0.1%"
    return f"{shown.removesuffix('.0')}%"


def many(count: float, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many are left."""
    left = len(names) - limit
    return ", ".join(names[:limit]) + (f", and {left} more" if left > 0 else "")


def speedup(ms: float | None, plain_ms: float | None) -> str | None:
    """How many times faster, None where nobody knows."""
    return None if not ms or plain_ms is None else f"{plain_ms / ms:.2f}x"
