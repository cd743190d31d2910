"""`WarmUp`: a partition's plain calls before it is recorded, and whether they sync."""

from collections.abc import Sequence
from typing import Any

from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.owner import Owner
from cgpass.runtime.syncs import syncs_noted


class WarmUp:
    """Runs a partition plainly, and notes whether it syncs."""

    def __init__(self, fn: BoxedCallable, owner: Owner) -> None:
        """Nothing ran yet.

        Args:
            fn: What the partition runs.
            owner: Of the pool that the first recording will lie in.
        """
        self._fn = fn
        self._owner = owner
        self.found_syncs = False
        """Whether the last call that was checked seemed to wait for the device."""

    def run(self, args: list[Any], *, check_syncs: bool) -> Sequence[Any]:
        """Run one call; `args` is emptied."""
        if check_syncs:
            with syncs_noted(self._owner.driver.device) as found:
                outputs = self._run(args)
            self.found_syncs = bool(found)
            return outputs
        return self._run(args)

    def _run(self, args: list[Any]) -> Sequence[Any]:
        if self._owner.has_recordings():
            return self._fn(args)
        return self._owner.driver.warm_up(self._fn, args)
