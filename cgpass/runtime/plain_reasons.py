"""Why a call that could have been replayed ran without a graph, as `CallReasons` are told."""

from collections.abc import Sequence

from cgpass.inputs import InputInfo
from cgpass.reason import CallReasons, many
from cgpass.runtime.limits import Refusal
from cgpass.runtime.signature import describe

_NAMED = 3
"""Inputs that a reason names."""


def note(
    reasons: CallReasons,
    infos: Sequence[InputInfo],
    *,
    is_capturing: bool,
    strays: Sequence[int],
    refusal: Refusal | None,
    held: int | None,
) -> None:
    """Note why a call of a partition that is captured runs without a graph; the first that holds.

    Args:
        reasons: Told why.
        infos: Of all inputs.
        is_capturing: Whether somebody else captures a graph that the call becomes a part of.
        strays: Inputs that no recording had just made.
        refusal: A limit that left no room, if that is why.
        held: How many calls' results may be held, if that is why.
    """
    if is_capturing:
        reasons.note("outer_capture", lambda: ("somebody else captured a graph of them", None))
    elif strays:
        reasons.note("not_in_the_pool", lambda: not_in_the_pool([infos[i] for i in strays]))
    elif refusal is not None:
        reasons.note(refusal.option, lambda: refused(refusal, infos))
    elif held is not None:
        reasons.note("max_pending_calls", lambda: too_many_held(held))


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


def too_many_held(limit: int) -> tuple[str, None]:
    """Results that are held."""
    return (
        f"results of {many(limit, 'earlier call')} were still referenced, as many as max_pending_calls={limit} allows",
        None,
    )
