"""`Promotion`: drops recordings that copy what never moves, or that read what moved after all."""

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from cgpass.inputs import InputInfo
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import describe
from cgpass.runtime.table import RecordingTable
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)


class Promotion:
    """Makes room for better recordings of one partition. See Note [Inputs that never move]."""

    def __init__(
        self,
        name: str,
        owner: Owner,
        table: RecordingTable,
        infos: Sequence[InputInfo],
        stats: CallStats,
    ) -> None:
        """Nothing was dropped yet.

        Args:
            name: Of the partition, for messages.
            owner: Of its recordings.
            table: Which has them.
            infos: Its inputs.
            stats: Where promotions are counted.
        """
        self._name = name
        self._owner = owner
        self._table = table
        self._infos = infos
        self._stats = stats
        self._stale: list[Recording] = []
        """Recordings that can't be reached any more, while somebody holds their outputs."""

    def gives_way(
        self, recording: Recording, recordings: Iterable[Recording], args: Sequence[Any]
    ) -> bool:
        """Whether a recording was dropped for one that copies less.

        Args:
            recording: About to be replayed; nobody holds its outputs.
            recordings: All of its signature.
            args: This call's inputs.
        """
        watch = recording.watch
        if watch is None:
            return False
        ready = watch.note(args)
        if watch.settled:
            recording.watch = None
        if not ready:
            return False
        watch.settle()
        self._stats.promotions += 1
        names = self._describe(watch.positions)
        log.info("%s records again: %s never moved, and is copied no more", self._name, names)
        for other in tuple(recordings):  # more than one where results of several calls are held
            if not other.memory.any_held():
                self._drop(other)
        return True

    def drop_mistaken(self, recordings: Iterable[Recording], args: Sequence[Any]) -> None:
        """Drop recordings of a signature whose stationary inputs moved after all."""
        for recording in tuple(recordings):
            moved = recording.moved(args)
            if moved:
                names = self._describe(moved)
                log.info("%s records again: %s moved, and is copied from now on", self._name, names)
                if not recording.memory.any_held():
                    self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        self._owner.forget_readers(recording)
        self._table.remove(recording)
        self._owner.close_recording(recording)
        self._owner.give_back_unused()

    def forget_readers(self, addresses: Collection[int]) -> None:
        """Drop recordings that read what other recordings put at some addresses, once nobody holds their outputs."""
        self._stale += self._table.remove_readers(addresses)
        self.drop_stale()

    def drop_stale(self) -> None:
        """Drop what can't be reached and nobody holds anything of by now."""
        if not self._stale:
            return
        idle = [recording for recording in self._stale if not recording.memory.any_held()]
        self._stale = [recording for recording in self._stale if recording not in idle]
        for recording in idle:
            self._owner.close_recording(recording)
        if idle:
            self._owner.give_back_unused()

    def take_stale(self) -> list[Recording]:
        """What can't be reached any more, for the caller to close."""
        stale, self._stale = self._stale, []
        return stale

    def _describe(self, positions: Iterable[int]) -> str:
        return describe(self._infos[i] for i in positions)
