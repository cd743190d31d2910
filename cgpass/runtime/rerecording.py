"""`Rerecording`: has what was recorded before inputs moved recorded anew, and calls wait for that."""

import logging
from collections.abc import Sequence
from typing import Any, Final

from cgpass.runtime.owner import Owner
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe
from cgpass.runtime.table import RecordingTable

log = logging.getLogger(__name__)

_CALLS_OF_A_STEP: Final = 256
"""Calls in which some step of a training should have come to its end."""
_MOST_MOVES: Final = 32
"""Times that stationary inputs may move without it counting in `MAX_STARTS`."""


class Rerecording:
    """Asks for all recordings to be laid out anew, for one partition. See Note [Inputs that never move]."""

    def __init__(self, name: str, owner: Owner) -> None:
        """Nothing moved yet.

        Args:
            name: Of the partition, for messages.
            owner: Of all recordings.
        """
        self._name = name
        self._owner = owner
        self._waits = 0
        """Calls that record nothing unless all recordings were laid out anew before."""
        self._order = 0
        """The last order that was waited for."""
        self._asked = False
        """Whether that was asked for since stationary inputs moved."""
        self._in_vain = -1
        """`num_drops` when that was waited for and outputs were held all the time: nothing waits before the next one."""
        self.results_move = False
        """Whether results of recordings that inputs were taken to be lay elsewhere in some call: layers left out, say."""

    def begin(self, rounds: int = 1) -> None:
        """Have what was recorded so far, in whatever order, laid out anew between two steps.

        Args:
            rounds: How many times as many calls as there are recordings wait for that.
        """
        count = len(self._owner.recordings())
        self._waits = rounds * count
        if count:
            patience = max(_CALLS_OF_A_STEP, 2 * count)
            self._owner.ask_to_start_over(patience=patience, settles=True)

    def begin_in_order(self) -> bool:
        """As `begin`, for a recording that would lie apart since it comes later than others; returns whether it waits."""
        if self.waits:
            return True
        orders = self._owner.orders
        if not orders.add(self._owner.num_drops, waits=self._owner.starts.wanted):
            return False
        if self._order == orders.count:  # waited for it as long as it was worth
            return False
        self._order = orders.count
        self.begin(rounds=2)
        return self.waits

    @property
    def waits(self) -> bool:
        """Whether calls are not recorded before all recordings were laid out anew."""
        return self._waits > 0 and self._owner.starts.wanted

    def is_over(
        self,
        table: RecordingTable,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
    ) -> bool:
        """Whether a call may be recorded: not while recordings wait to be made anew.

        Args:
            table: The partition's recordings. Stationary inputs of theirs that moved are known as moving afterwards.
            layout: Of its inputs.
            keys: The call's signature.
            args: Its inputs.
        """
        waits = self.waits
        self._waits = self._waits - 1 if waits else 0
        return not waits and self._moves_are_over(table, layout, keys, args)

    def _moves_are_over(
        self,
        table: RecordingTable,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
    ) -> bool:
        moved = sorted({i for recording in table.find(*keys) for i in recording.moved(args)})
        was_asked, self._asked = self._asked, bool(moved)
        if not moved:
            return True
        in_vain = self._in_vain == self._owner.num_drops
        if (in_vain or not was_asked) and self._leave_out(moved, table, layout, keys, args):
            settles = self._owner.num_moves <= _MOST_MOVES
            self._owner.ask_to_start_over(settles=settles)
        elif not was_asked and not in_vain:
            self._owner.ask_to_start_over()
        if in_vain:
            self._asked = False
            return True
        started = self._owner.start_over_if_idle()
        self._asked = not started and self._owner.starts.wanted
        if not (started or self._asked):
            self._in_vain = self._owner.num_drops
        return not self._asked

    def _leave_out(
        self,
        moved: Sequence[int],
        table: RecordingTable,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
    ) -> bool:
        """Have stationary inputs that moved copied for good; returns whether some were not known to move."""
        watch = table.watch(*keys, args)
        self.results_move |= not watch.handed_on.isdisjoint(moved)
        before = watch.positions
        watch.stationary(args)
        if watch.positions == before:
            return False
        names = describe(layout.infos[i] for i in moved)
        log.info("%s: %s moved, and is copied from now on", self._name, names)
        self._owner.num_moves += 1
        return True
