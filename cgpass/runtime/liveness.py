"""Who still holds what: outputs of recordings that a later replay could overwrite.

Note [Birth order]
    All recordings of an owner share one pool, and every recording keeps its outputs allocated as long as it lives.
    A recording made later can therefore never lie on an output of an earlier one, but its outputs may lie where an
    earlier one has temporaries. So replaying recording R can overwrite outputs of R itself and of recordings born
    after R, never those of recordings born before it. R may be replayed exactly when no output of a recording born at
    or after R is held. `LiveOutputs` keeps the recordings whose outputs were handed out in birth order; what is on its
    top decides.

    Where results of one call are still held in the next (forwards ahead of their backwards), birth order alone would
    ask for a younger recording every time. So a signature with two recordings gets its next one in another slot: a
    pool of its own, in which nothing is held. Slots share no memory, and calls that take turns keep taking turns.
"""

from collections.abc import Sequence

import torch

from cgpass import _torch
from cgpass.runtime import fast


class HeldStorages:
    """Tells whether anybody but the recording itself holds one of its output storages.

    Every holder counts, since each keeps a reference to the StorageImpl: Python tensors, views, autograd's saved
    tensors, `.grad` fields, closures.
    """

    __slots__ = ("_baseline", "_cdatas", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Args: tensors: the recording's own outputs; nobody else holds their storages yet."""
        self._tensors = tensors
        self._cdatas = tuple({t.untyped_storage()._cdata: None for t in tensors})
        self._baseline = tuple(map(_torch.storage_use_count, self._cdatas))

    def any_held(self) -> bool:
        """Whether some storage has other references than the recording's own."""
        return fast.any_held(self._cdatas, self._baseline)


class LiveOutputs:
    """Recordings whose outputs may be held, in order of birth. See Note [Birth order]."""

    __slots__ = ("_stack",)

    def __init__(self) -> None:
        """Nothing was handed out yet."""
        self._stack: list[tuple[int, HeldStorages]] = []

    def youngest(self) -> int:
        """Birth of the youngest recording with a held output, -1 if none: only younger ones may be replayed."""
        stack = self._stack
        while stack:
            birth, held = stack[-1]
            if held.any_held():
                return birth
            stack.pop()
        return -1

    def push(self, birth: int, held: HeldStorages) -> None:
        """Note that a recording younger than every held one hands out its outputs."""
        self._stack.append((birth, held))
