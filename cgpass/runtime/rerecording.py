"""`Rerecording`: has what was recorded before inputs moved recorded anew, and calls wait for that."""

import logging
from collections.abc import Sequence
from typing import Any

from cgpass.runtime.owner import Owner
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe
from cgpass.runtime.table import RecordingTable

log = logging.getLogger(__name__)


class Rerecording:
    """Asks for all recordings to be laid out anew, for one partition. See Note [Inputs that never move]."""

    def __init__(self, name: str, owner: Owner, *, is_backward: bool) -> None:
        """Nothing moved yet.

        Args:
            name: Of the partition, for messages.
            owner: Of all recordings.
            is_backward: Whether it is a backward.
        """
        self._name = name
        self._owner = owner
        self._starting_over = owner.starting_over
        self._is_backward = is_backward
        self._asked = False
        """Whether that was asked for since stationary inputs moved."""

    def begin(self) -> None:
        """Have what was recorded so far, in whatever order, laid out anew as a step begins."""
        if self._owner.recordings():
            self._starting_over.ask_for_order(is_backward=self._is_backward)

    def begin_once_more(self) -> bool:
        """Before a recording gets a pool of its own, have all laid out anew; returns whether it is to wait for that."""
        return self._starting_over.ask_once_more(
            len(self._owner.recordings()), is_backward=self._is_backward
        )

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
        return not self._starting_over.waits and self._moves_are_over(table, layout, keys, args)

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
        if not was_asked:
            names = describe(layout.infos[i] for i in moved)
            log.info("%s: %s moved, and is copied from now on", self._name, names)
            table.watch(*keys, args).stationary(args)  # leaves them out
            self._starting_over.ask()
        done = self._owner.start_over_if_it_is_time(is_backward=self._is_backward)
        self._asked = not done and self._starting_over.wanted
        return not self._asked
