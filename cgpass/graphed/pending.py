"""Forwards whose backward has not come yet, and what a replay would do to what they saved.

Note [Order of replays]
    What a forward saves for its backward lies in the pool, from the forward's capture until the backward's, inside of
    which it dies. Every recording made in between lies elsewhere; every other one may lie there too. So with a forward
    pending, a recording may be replayed if it was made after that forward and not after its backward. Calls that come
    in the order of the recordings never break this rule.

    For those that do, the pending forward is put aside first: all that outlived its capture (known from the allocator,
    so nothing can be missed) and its inputs are copied away, and back before its backward. So any order gives right
    numbers, several calls of one callable may be pending, and only those that leave the order pay for it.
"""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A forward whose backward may come."""

    first: int
    """Birth of the forward's recording."""
    last: float
    """Birth of the backward's; infinite if that leaves what it read alone."""

    def put_aside(self) -> None:
        """Copy away what the backward needs."""


class PendingCalls:
    """Pending forwards of one pool, oldest first. See Note [Order of replays].

    **Lifetime:** holds none of them; a forward whose graph was dropped is pending no more.
    """

    def __init__(self) -> None:
        """Nothing is pending."""
        self._stack: list[tuple[weakref.ref[Pending], int, float]] = []
        """Each with bounds for what may be replayed while it and those before it are pending."""

    def add(self, call: Pending) -> None:
        """Note a forward that was replayed."""
        first, last = self._stack[-1][1:] if self._stack else (-1, math.inf)
        self._stack.append((weakref.ref(call), max(first, call.first), min(last, call.last)))

    def remove(self, call: Pending) -> None:
        """Note that a forward is pending no more."""
        if self._stack and self._stack[-1][0]() is call:
            self._stack.pop()
        else:
            self._keep([other for other in self.alive() if other is not call])

    def alive(self) -> list[Pending]:
        """Those that are pending."""
        return [call for ref, _, _ in self._stack if (call := ref()) is not None]

    def make_way(self, birth: int) -> None:
        """Have those put aside whose saved tensors a replay might overwrite."""
        if not self._stack:
            return
        _, first, last = self._stack[-1]
        if first < birth <= last:
            return
        calls = self.alive()
        self._keep([call for call in calls if call.first < birth <= call.last])
        for call in calls:
            if not call.first < birth <= call.last:
                call.put_aside()

    def _keep(self, calls: Sequence[Pending]) -> None:
        self._stack.clear()
        for call in calls:
            self.add(call)


class Aside:
    """A copy of memory, to be put back where it was."""

    def __init__(self, places: Sequence[torch.Tensor]) -> None:
        """Copy, on the current stream.

        Args:
            places: Tensors on the memory; whoever keeps that alive must do so until `put_back`.
        """
        self._places = places
        with torch.no_grad():
            self._copies = [torch.empty_like(place) for place in places]
            if places:
                torch._foreach_copy_(self._copies, list(places))

    @property
    def num_bytes(self) -> int:
        """How much was copied."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)

    def put_back(self) -> None:
        """Copy back, on the current stream."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._places), self._copies)
