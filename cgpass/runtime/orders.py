"""`Orders`: how often all recordings of a function are made anew since one came late."""

from typing import Final

MOST_ORDERS: Final = 4
"""Times that recordings are made anew since one came late."""
MOST_UNMET: Final = 2
"""Waits in a row in which nothing was made anew, since outputs are held at all times: then nothing waits any more."""


class Orders:
    """What the partitions of a function asked for together."""

    def __init__(self) -> None:
        """Nothing was asked for."""
        self.count = 0
        """Times that it was asked for."""
        self._drops = -1
        self._unmet = 0

    def add(self, num_drops: int, *, waits: bool) -> bool:
        """Ask for one more, or share one that is asked for and not made yet.

        Args:
            num_drops: Times that all recordings were dropped so far.
            waits: Whether they wait to be.

        Returns:
            Whether it may be waited for.
        """
        same = self._drops == num_drops
        if waits and same:
            return True
        self._unmet = self._unmet + 1 if same else 0
        if self.count >= MOST_ORDERS or self._unmet >= MOST_UNMET:
            return False
        self.count += 1
        self._drops = num_drops
        return True
