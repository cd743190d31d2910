"""`Orders`: how often all recordings of a function are made anew since one came late."""

from typing import Final

MOST_ORDERS: Final = 4
"""Times that recordings are made anew since one came late."""


class Orders:
    """What the partitions of a function asked for together."""

    def __init__(self) -> None:
        """Nothing was asked for."""
        self.count = 0
        """Times that it was asked for."""
        self._drops = -1

    def add(self, num_drops: int, *, waits: bool) -> bool:
        """Ask for one more, or share one that is asked for and not made yet.

        Args:
            num_drops: Times that all recordings were dropped so far. If that has not grown since the last one was asked
                for, outputs are held at all times, and there are no more.
            waits: Whether they wait to be dropped.

        Returns:
            Whether it may be waited for.
        """
        if self._drops == num_drops:
            return waits
        if self.count >= MOST_ORDERS:
            return False
        self.count += 1
        self._drops = num_drops
        return True
