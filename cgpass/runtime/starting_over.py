"""`StartingOver`: when every recording of a compiled function is dropped, to be laid out anew.

Note [In the order of a step]
    Recordings share a pool in the order in which they were made: what one leaves for the backward is not written by
    those made after it. Layers whose parameters are gathered (FSDP's) need not come in their order: each is recorded
    once its parameters come to a place again, so that one is recorded between the replays of others, or after the
    backward of others. It then finds no room in the first pool, and would have one of its own.

    So before it gets one all recordings are asked to be laid out anew, once more. That is done as a step begins, with
    the first call after a backward: in the middle of a step (where nothing may be held either, as long as calls warm
    up) the rest of the forward would be recorded first. Programs that do hold results of many calls (microbatches of a
    pipeline) get their pools all the same: nothing is asked for where a module's own results are in the way, and else
    a few times only, each after twice as many calls.

    Where layers take turns at places, a recording that was made for one of the last layers may be replayed for one of
    the first, in another step, and all that is recorded after it finds no room again. So if laying out once was not
    enough, recordings are replayed only for the module that they were made for: more of them, in one pool.
"""

from typing import Final

from cgpass.telemetry import CallStats

MAX_STARTS = 8
"""Times that all recordings are dropped to be made anew."""
PATIENCE = 8
"""Calls that wait for nothing to be held."""
ROUNDS: Final = 6
"""Times that recordings are laid out anew since one found no room in the first pool."""
BINDING: Final = 2
"""Of these, so many before recordings are replayed only for the module that they were made for."""
_CALLS_OF_A_STEP: Final = 256
"""Calls in which some step of a training should have come to its end."""


class StartingOver:
    """What was asked for, by which partition of a compiled function ever, and how often it was done."""

    def __init__(self) -> None:
        """Nothing was asked for."""
        self.wanted = False
        """Whether it is to be asked before the next replay whether it is time."""
        self._starts = 0
        self._refusals = 0
        self._settles = False
        """Whether it is asked for by what comes to an end by itself."""
        self._after_backward = False
        """Whether the last call was a backward, while something is wanted."""
        self._trains = False
        self._partitions: list[CallStats] = []
        self._rounds = 0
        self._next_round = 0
        """Calls after which the next one may be."""

    def add(self, stats: CallStats, *, is_backward: bool) -> None:
        """Note a partition by where its calls are counted."""
        self._partitions.append(stats)
        self._trains |= is_backward

    def ask(self, *, patience: int = PATIENCE) -> None:
        """Have every recording made anew as soon as nothing is held.

        Args:
            patience: Calls that wait for that; after them, what is held is moved, once it can be. The least counts.
        """
        refusals = PATIENCE - patience
        if self.wanted:
            self._refusals = max(self._refusals, refusals)
        elif self._starts < MAX_STARTS:
            self.wanted, self._refusals = True, refusals

    def ask_for_order(self, *, is_backward: bool) -> None:
        """Have every recording made anew as a step begins; who asks must not do so for ever.

        Args:
            is_backward: Whether a backward asks.
        """
        if not self.wanted:
            self.wanted = True
            self._refusals = PATIENCE - (_CALLS_OF_A_STEP if self._trains else PATIENCE)
        if not self._settles:
            self._settles, self._after_backward = True, is_backward

    def ask_once_more(self, num_recordings: int, *, is_backward: bool) -> bool:
        """As `ask_for_order`, for a recording that finds no room in the first pool.

        Args:
            num_recordings: How many there are.
            is_backward: Whether it is a backward's.

        Returns:
            Whether it is to wait for that. If not, it was done often enough, or just now.
        """
        if self.waits:
            return True
        calls = sum(stats.calls for stats in self._partitions)
        if self._rounds >= ROUNDS or calls < self._next_round:
            return False
        self._next_round = calls + (num_recordings << self._rounds)
        self._rounds += 1
        self.ask_for_order(is_backward=is_backward)
        return True

    @property
    def waits(self) -> bool:
        """Whether what is recorded now would be dropped as the next step begins."""
        return self._settles and self.wanted

    @property
    def binds(self) -> bool:
        """Whether recordings are to be replayed only for the module that they were made for."""
        return self._rounds >= BINDING

    @property
    def is_spent(self) -> bool:
        """Whether it was done so often that it is not any more."""
        return self._starts >= MAX_STARTS and not self._settles

    def is_time(self, *, held: bool, is_backward: bool) -> bool:
        """Note a call; returns whether it begins with what was asked for.

        Args:
            held: Whether outputs are held. Where some always are, they are no reason to wait after a while, and none
                as a step begins: those that a backward is still to read can't be moved.
            is_backward: Whether it is a backward.
        """
        begins, self._after_backward = self._after_backward and not is_backward, is_backward
        self._refusals += 1
        if begins if self._settles and self._trains else not held:
            return True
        if self._refusals <= PATIENCE:
            return False
        self.wanted = self._refusals <= 2 * PATIENCE
        self._settles &= self.wanted
        return True

    def give_up(self) -> None:
        """Nothing is wanted any more, or it was done."""
        self.wanted = self._settles = False

    def note_done(self) -> None:
        """Count a time that it was done."""
        self._starts += not self._settles

    def forget(self) -> None:
        """Begin anew, whatever was used up before."""
        self._starts = self._refusals = self._rounds = self._next_round = 0
        self.give_up()
