"""What one call of a captured partition does: a table, looked up in one place.

Note [What a call does]
    usable: no failed capture, owner not closed, no foreign capture on this stream, pooled inputs in the pool
    warm:   this shape had its warm-up calls
    safe:   a recording of this signature exists whose replay overwrites nothing that is held
    room:   the limits allow one more recording
"""

import enum


class Action(enum.Enum):
    """What one call does."""

    WARM_UP = "warm up"
    RECORD = "record"
    REPLAY = "replay"
    PLAIN = "run plainly"


_TABLE: tuple[tuple[bool | None, bool | None, bool | None, bool | None, Action], ...] = (
    # usable, warm, safe, room; None fits anything; the first row that fits decides
    (False, None, None, None, Action.PLAIN),
    (True, False, None, False, Action.PLAIN),
    (True, False, None, True, Action.WARM_UP),
    (True, True, True, None, Action.REPLAY),
    (True, True, False, True, Action.RECORD),
    (True, True, False, False, Action.PLAIN),
)


def decide(*, usable: bool, warm: bool, safe: bool, room: bool) -> Action:
    """Look a call up. See Note [What a call does]."""
    given = (usable, warm, safe, room)
    for *row, action in _TABLE:
        if all(want is None or want == have for want, have in zip(row, given, strict=True)):
            return action
    raise AssertionError("the table covers every call")
