"""Why a call that could have been replayed ran without a graph, as `CallReasons` are told."""

from collections.abc import Sequence
from dataclasses import dataclass

from cgpass.inputs import InputInfo
from cgpass.reason import many
from cgpass.runtime.signature import describe

_NAMED = 3
"""Inputs that a reason names."""


@dataclass(frozen=True)
class Refusal:
    """A limit that left no room for a recording."""

    option: str
    limit: int
    inputs: tuple[int, ...]
    """What was new in the call, by position."""


def refused(refusal: Refusal, infos: Sequence[InputInfo]) -> tuple[str, str | None]:
    """A limit that left no room for a recording, and the user's line that reads what was new.

    Args:
        refusal: What the table of recordings said.
        infos: Of all inputs.
    """
    inputs = [infos[i] for i in refusal.inputs]
    names = ", ".join(info.name for info in inputs[:_NAMED])
    names += f", and {len(inputs) - _NAMED} more" if len(inputs) > _NAMED else ""
    line = next((info.line for info in inputs if info.line is not None), None)
    limit = f"{refusal.option}={refusal.limit}"
    if refusal.option == "max_recordings":
        new = names or "what they are given"
        return (
            f"as many shapes are recorded as {limit} allows, and another value or layout of {new} came",
            line,
        )
    if refusal.option == "max_static_sets":
        new = f"{names} lay elsewhere" if names else "another set came"
        return (
            f"as many sets of parameters and buffers are recorded as {limit} allows, and {new}",
            line,
        )
    moved = names or "parameters and buffers"
    return f"{moved} moved, and was recorded anew for that as often as {limit} allows", line


def not_in_the_pool(infos: Sequence[InputInfo]) -> tuple[str, str | None]:
    """Inputs that no recording had just made."""
    line = next((info.line for info in infos if info.line is not None), None)
    return (
        f"{describe(infos, _NAMED)} lay where no recording had put it: made without a graph, or moved since",
        line,
    )


def held(limit: int) -> tuple[str, None]:
    """Results that are held."""
    return (
        f"results of {many(limit, 'earlier call')} were held, as many as max_pending_calls={limit} allows",
        None,
    )
