"""`Strays`: inputs that should lie where a recording put them, and don't."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from cgpass.inputs import InputInfo, InputKind
from cgpass.runtime.owner import Owner
from cgpass.runtime.writes import has_place

_CALLS_UNTIL_COPIED: Final = 8
"""Calls in a row with strays before these are copied from then on."""
_CALLS_FOR_GOOD: Final = 2
"""The same for strays that are made by what turned out to run plainly."""
_PASSING: Final = 1024
"""Calls that don't count since what made their strays is taken to be recorded soon."""


class Strays:
    """Finds pooled inputs that lie outside the pool, call after call."""

    def __init__(self, owner: Owner) -> None:
        """Args: owner: of the pool."""
        self._owner = owner
        self._last_call = 0
        self._in_a_row = 0
        self._passing = 0

    def find(self, args: Sequence[Any], pooled: Sequence[int], call: int) -> list[int]:
        """Those among one call's inputs.

        Args:
            args: The inputs.
            pooled: Which of them should lie in the pool.
            call: The call's number.
        """
        found = [i for i in pooled if args[i].numel() and not self._owner.is_pool_storage(args[i])]
        if found:
            self._in_a_row = self._in_a_row + 1 if self._last_call == call - 1 else 1
            self._last_call = call
        return found

    def persist(self, args: Sequence[Any], strays: Sequence[int]) -> bool:
        """Whether they were found in so many calls in a row that they are better copied.

        Calls don't count where a warm-up made the strays, or while all recordings wait to be made anew.
        """
        passing = self._owner.starts.wanted or self.are_of_warm_up(args, strays)
        if passing and self._passing < _PASSING:
            self._passing += 1
            self._in_a_row -= 1
        if all(args[i].untyped_storage() in self._owner.made_plainly for i in strays):
            return self._in_a_row >= _CALLS_FOR_GOOD
        return self._in_a_row >= _CALLS_UNTIL_COPIED

    def are_of_warm_up(self, args: Sequence[Any], strays: Sequence[int]) -> bool:
        """Whether a warm-up made them."""
        return all(self._owner.is_of_warm_up(args[i]) for i in strays)


def copied_instead(infos: Sequence[InputInfo], strays: Collection[int]) -> list[InputInfo]:
    """Inputs with the strays among them copied."""
    return [
        dataclasses.replace(info, kind=InputKind.COPIED) if i in strays else info
        for i, info in enumerate(infos)
    ]


def note_made_plainly(owner: Owner, outputs: Iterable[Any]) -> None:
    """Have an owner know what lies in its pool neither now nor, its partition running plainly, later."""
    for value in outputs:
        if not has_place(value) or owner.is_pool_storage(value) or owner.is_of_warm_up(value):
            continue
        owner.made_plainly.add(value.untyped_storage())
