"""What a replay would overwrite: outputs of recordings that somebody still holds.

Note [What a replay overwrites]
    Recordings of a slot share one pool. While a recording is made, no memory that is allocated can become part of it.
    So replaying recording R leaves alone the outputs of earlier recordings whose blocks were kept while R was made,
    and may overwrite its own, those of recordings made after it, and those of earlier ones that had been released
    (`Recording.released`) when it was made. What was given to it (`Recording.consumes`) it overwrites too: it may be
    replayed only if this call's inputs are the only holders.

    Where results of one call are still held in the next (forwards ahead of their backwards), a signature with two
    recordings gets its next one in another slot: a pool of its own, in which nothing is held. Slots share no memory,
    and calls that take turns keep taking turns. Recordings made for other parameters don't count: layers whose
    parameters are gathered in one place (FSDP's) run in one order, as layers with places of their own do.
"""

from typing import Generic, Protocol, TypeVar

from cgpass.runtime import fast
from cgpass.runtime.output_memory import OutputMemory


class Made(Protocol):
    """A recording, as far as its outputs matter."""

    birth: int
    memory: OutputMemory
    released: dict[int, tuple[int, ...]]
    """Blocks that were free when it was made, by the birth of the recording whose outputs lay there."""


R = TypeVar("R", bound=Made)


class LiveOutputs(Generic[R]):
    """Recordings of one slot whose outputs may be held, in order of birth."""

    __slots__ = ("_stack",)

    def __init__(self) -> None:
        """Nothing was handed out yet."""
        self._stack: list[tuple[int, OutputMemory, R]] = []

    def youngest(self) -> int:
        """Birth of the youngest recording with a held output, -1 if none."""
        stack = self._stack
        while stack:
            birth, memory, _ = stack[-1]
            if memory.any_held():
                return birth
            stack.pop()
        return -1

    def push(self, recording: R) -> None:
        """Note that a recording younger than every held one hands out its outputs."""
        stack = self._stack
        while stack and stack[-1][0] >= recording.birth:  # what was held there was moved
            stack.pop()
        stack.append((recording.birth, recording.memory, recording))

    def discard(self, recording: R) -> None:
        """Forget a recording that is no more."""
        self._stack = [entry for entry in self._stack if entry[2] is not recording]

    def is_safe(self, recording: R) -> bool:
        """Whether a replay overwrites nothing that is held. See Note [What a replay overwrites]."""
        if self.youngest() >= recording.birth:
            return False
        released = recording.released
        return not released or not fast.any_held_among(self._stack, released)

    def overwritten_by(self, recording: R) -> list[tuple[R, list[int]]]:
        """Recordings with held outputs that a replay would overwrite, and the blocks of each."""
        found: list[tuple[R, list[int]]] = []
        for other in dict.fromkeys(other for _, _, other in self._stack):
            among = None
            if other.birth < recording.birth:
                among = recording.released.get(other.birth, ())
            blocks = other.memory.held(among)
            if blocks:
                found.append((other, blocks))
        return found
