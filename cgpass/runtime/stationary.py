"""`Watch`: finds copied inputs that never move, for a recording that reads them where they lie.

Note [Inputs that never move]
    Every signature's copied inputs are watched while it replays. Those that lay in one place for some calls are
    stationary: a recording can read them there, without a copy, if its replays check that they still do.

    All recordings of the compiled function are then made anew, as soon as nobody holds outputs of theirs: the backward
    lies on what the forward saved, and one of the two made later would need memory of its own. When a stationary input
    moves after all they are made anew once more (calls until then run plainly), and it is copied for good: nothing
    flaps. An input may move a few times before it counts as moving, since recordings that are made anew themselves
    move what they hand to others.
"""

import itertools
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Final

from cgpass.runtime import fast

CALLS: Final = 16
"""Replays in a row in which an input must not move."""
MOVES: Final = 2
"""Times that an input may move before it is known to."""


class Watch:
    """Where the copied inputs of one signature lie, call after call. See Note [Inputs that never move]."""

    __slots__ = ("_addresses", "_calls", "_moves", "handed_on", "positions", "settled")

    def __init__(self, positions: Iterable[int]) -> None:
        """Args: positions: inputs that may turn out not to move."""
        self.positions = tuple(positions)
        """Inputs that did not move so far; none once it is known that all do."""
        self.settled = not self.positions
        """Whether nothing more is to be found out."""
        self.handed_on: set[int] = set()
        """Inputs that are taken to stay since they are results of recordings."""
        self._addresses = b""
        self._calls = 0
        self._moves = dict.fromkeys(self.positions, -1)  # the first address is no move

    def note(self, args: Sequence[Any]) -> bool:
        """Note one replay's inputs; returns whether they have not moved for long."""
        addresses = fast.static_key(args, self.positions)
        if addresses != self._addresses:
            self._note_moves(addresses)
        self._calls += 1
        return self._calls > CALLS and not self.settled

    def _note_moves(self, addresses: bytes) -> None:
        old = self._addresses or bytes(len(addresses))
        for i, (a, b) in zip(self.positions, _pairs(old, addresses), strict=True):
            self._moves[i] += a != b
        self._keep(addresses, [self._moves[i] <= MOVES for i in self.positions])
        self._calls = 0
        self.settled = not self.positions

    def stationary(
        self,
        args: Sequence[Any],
        written: Container[int] = (),
        is_handed_on: Callable[[Any], bool] | None = None,
        *,
        results_stay: bool = True,
    ) -> tuple[int, ...]:
        """Which inputs a recording made now reads where they lie.

        Those that moved since they settled never will be, nor those that are written and were made in inference mode: a
        capture may not write them.

        Args:
            args: Inputs of the call that is recorded.
            written: Those that it writes.
            is_handed_on: Whether an input is a recording's result: where all are made anew, it may lie elsewhere, and
                stays there.
            results_stay: Whether results do. If some were found not to, none is read where it lies.
        """
        if not self.settled and self._calls < max(1, CALLS // 2):
            return ()
        self.settled = True
        addresses = fast.static_key(args, self.positions)
        pairs = _pairs(self._addresses, addresses)
        moved = {i for i, (a, b) in zip(self.positions, pairs, strict=True) if a != b}
        if is_handed_on is not None:
            results = {i for i in self.positions if is_handed_on(args[i])}
            moved = moved - results if results_stay else moved | results
            self.handed_on |= results - moved
        self._keep(addresses, [i not in moved for i in self.positions])
        return tuple(i for i in self.positions if i not in written or not args[i].is_inference())

    def _keep(self, addresses: bytes, which: Sequence[bool]) -> None:
        """Go on with some of the inputs."""
        left = itertools.compress(zip(self.positions, array("q", addresses), strict=True), which)
        kept = dict(left)
        self.positions = tuple(kept)
        self._addresses = array("q", kept.values()).tobytes()


def _pairs(first: bytes, second: bytes) -> Iterable[tuple[int, int]]:
    return zip(array("q", first), array("q", second), strict=True)
