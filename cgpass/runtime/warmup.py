"""`WarmUp`: a partition's plain calls before it is recorded, and what they tell of it."""

from collections.abc import Sequence
from typing import Any

import torch

from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.owner import Owner
from cgpass.runtime.syncs import syncs_noted


class WarmUp:
    """Runs a partition plainly, and notes what nobody told: inputs that it writes, and whether it syncs."""

    def __init__(self, fn: BoxedCallable, owner: Owner, *, notes_writes: bool) -> None:
        """Nothing ran yet.

        Args:
            fn: What the partition runs.
            owner: Of the pool that the first recording will lie in.
            notes_writes: Whether to find out which inputs are written.
        """
        self._fn = fn
        self._owner = owner
        self._notes_writes = notes_writes
        self.written: set[int] = set()
        """Inputs whose version counters moved."""
        self.found_syncs = False
        """Whether the last call that was checked seemed to wait for the device."""

    def run(self, args: list[Any], *, check_syncs: bool) -> Sequence[Any]:
        """Run one call; `args` is emptied."""
        if check_syncs:
            with syncs_noted(self._owner.driver.device) as found:
                outputs = self._run(args)
            self.found_syncs = bool(found)
            return outputs
        if not self._notes_writes:
            return self._run(args)
        tensors = [
            (i, a, a._version)
            for i, a in enumerate(args)
            if isinstance(a, torch.Tensor) and not a.is_inference()
        ]
        outputs = self._run(args)
        self.written.update(i for i, tensor, version in tensors if tensor._version != version)
        return outputs

    def _run(self, args: list[Any]) -> Sequence[Any]:
        if self._owner.has_recordings():
            return self._fn(args)
        return self._owner.driver.warm_up(self._fn, args)
