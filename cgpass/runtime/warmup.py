"""`WarmUp`: a partition's plain calls before it is recorded, and what they tell of it."""

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from cgpass import _torch
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.owner import Owner
from cgpass.runtime.syncs import syncs_noted
from cgpass.runtime.writes import Changes


class WarmUp:
    """Runs a partition plainly, and notes whether it syncs and what it writes."""

    def __init__(self, fn: BoxedCallable, owner: Owner) -> None:
        """Nothing ran yet.

        Args:
            fn: What the partition runs.
            owner: Of the pool that the first recording will lie in.
        """
        self._fn = fn
        self._owner = owner
        self._here = threading.local()
        self._extra = 3
        """How many threads may yet run a call after a capture of theirs failed."""
        self.found_syncs = False
        """Whether the last call that was checked seemed to wait for the device."""
        self.last_ms: float | None = None
        """Host time of the last call."""
        self.found_written: frozenset[int] = frozenset()
        """Inputs whose bits the last call changed, among those compared."""

    @property
    def ran_here(self) -> bool:
        """Whether this thread ran a call."""
        return getattr(self._here, "ran", False)

    def first_here(self) -> bool:
        """Whether what failed may succeed once this thread ran a call: libraries keep handles for each thread."""
        if self.ran_here or not self._extra:
            return False
        self._extra -= 1
        return True

    def run(
        self, args: list[Any], *, check_syncs: bool, compared: Sequence[int] = ()
    ) -> Sequence[Any]:
        """Run one call.

        Args:
            args: Its inputs; emptied.
            check_syncs: Whether to find out if it waits for the device.
            compared: Inputs to be compared with what they were before; waits for the device.
        """
        if compared:
            changes = Changes(args, compared)
            outputs = self._run_once(args, check_syncs=check_syncs)
            self.found_written = changes.found()
            return outputs
        return self._run_once(args, check_syncs=check_syncs)

    def _run_once(self, args: list[Any], *, check_syncs: bool) -> Sequence[Any]:
        if check_syncs:
            with syncs_noted(self._owner.driver.device) as found:
                outputs = self._run(args)
            self.found_syncs = bool(found)
            return outputs
        return self._run(args)

    def _run(self, args: list[Any]) -> Sequence[Any]:
        self._here.ran = True
        owner, start = self._owner, time.perf_counter()
        run = (
            self._fn
            if owner.has_recordings()
            else functools.partial(owner.driver.warm_up, self._fn)
        )
        with _torch.autocast_cache_off():
            outputs = run(args)
        self.last_ms = (time.perf_counter() - start) * 1e3
        return outputs
