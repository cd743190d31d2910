"""`Attempts`: tries to record calls, and makes those that could not be recorded."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cgpass import errors
from cgpass.runtime.failures import give_memory_back
from cgpass.runtime.fallback import Fallback
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.warmup import WarmUp
from cgpass.telemetry import CallStats


class Attempts:
    """Tries to record calls of one partition, and says what a call does whose recording failed."""

    def __init__(
        self,
        owner: Owner,
        warm_ups: WarmUp,
        fallback: Fallback,
        stats: CallStats,
        told: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Keep what every attempt needs.

        Args:
            owner: Of the pool that is recorded into.
            warm_ups: The partition's: they may have found that it waits for the device.
            fallback: Takes its place once it turned out that it can't be captured.
            stats: Where a call that warms up once more is counted.
            told: Shows, while it is open, that something is being recorded.
        """
        self._owner = owner
        self._warm_ups = warm_ups
        self._fallback = fallback
        self._stats = stats
        self._told = told

    def make(
        self, record: Callable[[], Recording | None], args: list[Any], close: Callable[[], None]
    ) -> Recording | Exception | None:
        """Try to record a call.

        Args:
            record: Returns a recording, None if this call is none for it.
            args: The call's inputs; left as they are.
            close: Drops the partition's recordings; called where something else takes its place from now on.

        Returns:
            A recording, what it failed with, or None if this partition was not to be recorded after all.

        Raises:
            CollectiveTimeoutError: Not one to be tried again on this process alone.
        """
        if self._warm_ups.found_syncs:
            self._warm_ups.found_syncs = False
            if self._fallback.split(args, None):
                close()
                return None
        try:
            # Memory of recordings is written in whatever mode later calls come: no inference tensors.
            with self._told(), torch.inference_mode(False), torch.no_grad():
                return record()
        except errors.CollectiveTimeoutError:
            raise
        except Exception as error:
            return error

    def run_without(
        self, args: list[Any], error: Exception | None, close: Callable[[], None]
    ) -> Sequence[Any]:
        """Make a call without a recording.

        Args:
            args: Its inputs; emptied.
            error: What `make` returned: that the recording raised it, or (None) was not to be made after all.
            close: See `make`. Called where there was no memory, too.
        """
        if error is None:
            self._fallback.note_failure()
            return self._fallback.run(args)
        if isinstance(error, torch.OutOfMemoryError):
            close()
            give_memory_back(error, self._owner.driver.device)
        elif self._warm_ups.first_here():
            outputs = self._warm_ups.run(args, check_syncs=False)
            self._stats.warmups += 1
            return outputs
        if self._fallback.split(args, error):
            close()
            self._fallback.note_failure()
            return self._fallback.run(args)
        return self._fallback.run_again(args, error)
