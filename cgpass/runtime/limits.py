"""`Limits` on recordings, and `Reached`: what a partition did of what they limit."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cgpass.inputs import InputInfo
from cgpass.runtime.signature import describe_moved
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a runner records. See `cgpass.Options` for the meaning of each."""

    num_warmup_calls: int = 1
    max_recordings: int = 64
    max_static_sets: int = 256
    max_rerecords: int = 128


@dataclass(frozen=True)
class Refusal:
    """A limit that left no room for a recording."""

    option: str
    limit: int
    inputs: tuple[int, ...]
    """What was new in the call, by position."""


class Reached:
    """How often parameters of one partition moved, and which limits left no room for a recording."""

    def __init__(
        self, name: str, infos: Sequence[InputInfo], limits: Limits, stats: CallStats
    ) -> None:
        """Nothing yet.

        Args:
            name: Of the partition, for messages.
            infos: Of its inputs.
            limits: How many recordings there may be.
            stats: Where recordings for moved parameters are counted.
        """
        self._name = name
        self._infos = infos
        self._limits = limits
        self._stats = stats
        self._num_rerecords = 0
        self._moves: Counter[int] = Counter()
        """How often each parameter moved."""
        self._warned: set[str] = set()
        """Options whose limits were reached."""
        self.refusal: Refusal | None = None
        """Why there was no room the last time that there was none."""

    def go_on_from(self, other: "Reached") -> None:
        """Take over what is known of a partition whose inputs were looked at in another way."""
        self._num_rerecords = other._num_rerecords
        self._moves = other._moves
        self._warned = other._warned

    def clear(self) -> None:
        """Forget what was counted and warned of."""
        self._num_rerecords = 0
        self._moves.clear()
        self._warned.clear()

    def note_moved(self, moved: Iterable[int]) -> None:
        """Count one move of each of these parameters."""
        self._moves.update(moved)

    def describe(self, moved: Sequence[int], args: Sequence[Any]) -> str:
        """Names of parameters, with how often each moved."""
        return describe_moved(self._infos, args, {i: self._moves[i] for i in moved})

    def may_rerecord(self, moved: Sequence[int], args: Sequence[Any]) -> bool:
        """Count one more recording for parameters that moved, unless there were as many as there may be."""
        self.note_moved(moved)
        limit = self._limits.max_rerecords
        if self._num_rerecords >= limit:
            self.refuse("max_rerecords", limit, moved, args)
            return False
        self._num_rerecords += 1
        self._stats.rerecordings += 1
        names = self.describe(moved, args)
        log.debug("%s records again (%d): %s", self._name, self._num_rerecords, names)
        return True

    def refuse(
        self,
        option: str,
        limit: int,
        moved: Sequence[int],
        args: Sequence[Any],
        changed: Sequence[int] = (),
    ) -> None:
        """Note that a limit leaves no room, and warn of it the first time.

        Args:
            option: Whose limit it is.
            limit: Its value.
            moved: Parameters that moved.
            args: The call's inputs, if any moved.
            changed: What else is new in the call.
        """
        self.refusal = Refusal(option, limit, (*moved, *changed))
        if option in self._warned:
            return
        self._warned.add(option)
        names = self.describe(moved, args)
        cause = f" In {self._stats.calls} calls: {names}." if moved else ""
        log.warning(
            "%s has as many recordings as %s=%d allows: calls with other shapes or addresses run without a graph, "
            "known ones keep replaying.%s Raise the option, or keep shapes and addresses fixed.",
            self._name,
            option,
            limit,
            cause,
        )
