"""The keys of one partition that were seen, the recordings of each, and why these were made."""

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cgpass import torch_private
from cgpass.runtime.inputs import Found, Layout, ShapeKey, describe, describe_tensors
from cgpass.runtime.recording import Recording
from cgpass.telemetry import tracing
from cgpass.telemetry.summaries import RECORDINGS_KEPT, RecordingNote
from cgpass.telemetry.tracing import Source

log = logging.getLogger(__name__)

_NAMED: Final = 3
"""Inputs that a cause names."""
_KEYS_KEPT: Final = 4096
"""Keys without a recording that are remembered: a bound on memory."""

Key = tuple[ShapeKey, bytes]
"""What is computed, and where the static inputs are read: see `Found.places`."""


@dataclass(eq=False)
class Seen:
    """A key that was seen, wherever the values of other recordings lay."""

    key: Key
    storages: dict[int, torch_private.WeakStorage]
    """Of the static inputs that are read in place, by what tells them apart."""
    draws: list[int]
    """How far random operators draw from where the partition begins: learnt in a call without a graph."""
    objects: tuple[object, ...] = ()
    """Those that the key knows by identity, kept alive so that no other object takes their place."""
    left_plain: tuple[str, str] | None = None
    """Why its calls run without a graph, if they do: a code, and in words."""
    recordings: dict[bytes, list[Recording]] = field(default_factory=dict)
    """By the addresses of other recordings' values, oldest first."""

    @property
    def made_for(self) -> tuple[int, ...]:
        """Which storages these are."""
        return tuple(self.storages)

    def all(self) -> list[Recording]:
        """Every recording of this key."""
        return [recording for each in self.recordings.values() for recording in each]

    @property
    def is_gone(self) -> bool:
        """True if something that it reads in place exists no more."""
        return any(storage.expired for storage in self.storages.values())


class RecordingTable:
    """Key -> addresses of other recordings' values -> recordings.

    No recording gives way to one of another key: they go when a storage that they read in place is gone.
    Keys without a recording are forgotten with their storages, too, and all but the newest.
    """

    def __init__(self, max_recordings: int) -> None:
        self._max_recordings = max_recordings
        self._seen: dict[Key, Seen] = {}
        self._unrecorded: dict[Key, Seen] = {}
        """Those without a recording, least recently used first."""
        self._recorded: Counter[tuple[int, ...]] = Counter()
        """Recordings of each set of storages."""
        self._full = 64
        """How many keys there are when those whose storages are gone are left out next."""
        self.newest: Key | None = None
        """The key that was remembered last."""

    def get(self, key: Key) -> Seen | None:
        """Return what is known of a key, if it was seen."""
        return self._seen.get(key)

    def recordings(self, shape: ShapeKey, places: bytes, values: bytes) -> list[Recording]:
        """Those for a call that copies nothing that may be read in place."""
        seen = self._seen.get((shape, places))
        return [] if seen is None else seen.recordings.get(values, [])

    def all(self) -> list[Recording]:
        """Every recording."""
        return [recording for seen in self._seen.values() for recording in seen.all()]

    def has_room(self, storages: tuple[int, ...]) -> bool:
        """Tell whether one more recording may be made for a set of storages."""
        return self._recorded[storages] < self._max_recordings

    def recorded_shape(self) -> ShapeKey | None:
        """Return what was computed by the newest recording, if there is one."""
        return next((s.key[0] for s in reversed(self._seen.values()) if s.recordings), None)

    def remember(self, new: Seen) -> Seen:
        """Note that a key was seen; returns what is known of it."""
        self.newest = new.key
        found = self._seen.setdefault(new.key, new)
        found.storages = new.storages
        if not found.recordings:
            self._unrecorded.pop(new.key, None)
            self._unrecorded[new.key] = found
        if len(self._unrecorded) > _KEYS_KEPT:
            self._forget(next(iter(self._unrecorded)))
        if len(self._seen) > self._full:
            self._forget_what_is_gone()
        return found

    def _forget_what_is_gone(self) -> None:
        for key, seen in list(self._seen.items()):
            if not seen.recordings and seen.is_gone:
                self._forget(key)
        self._full = 64 + 2 * len(self._seen)

    def _forget(self, key: Key) -> None:
        del self._seen[key]
        self._unrecorded.pop(key, None)

    def add(self, seen: Seen, values: bytes, recording: Recording) -> list[Recording]:
        """Keep a recording; returns all that read the same memory."""
        self._unrecorded.pop(seen.key, None)
        members = seen.recordings.setdefault(values, [])
        members.append(recording)
        self._recorded[recording.made_for] += 1
        return members

    def drop(self, wanted: Callable[[Recording], bool]) -> list[Recording]:
        """Forget some recordings, but not their keys; returns what is to be closed."""
        dropped = [recording for recording in self.all() if wanted(recording)]
        gone = {id(recording) for recording in dropped}
        self._recorded -= Counter(recording.made_for for recording in dropped)
        for seen in self._seen.values():
            left = {
                at: [r for r in each if id(r) not in gone] for at, each in seen.recordings.items()
            }
            seen.recordings = {at: each for at, each in left.items() if each}
        return dropped

    def drop_gone(self) -> list[Recording]:
        """Forget keys whose storages are gone; returns their recordings, unless outputs of these are held."""
        old = {r.birth for s in self._seen.values() if s.recordings and s.is_gone for r in s.all()}
        dropped = self.drop(lambda r: r.birth in old and not r.memory.any_held()) if old else []
        self._forget_what_is_gone()
        return dropped

    def clear(self) -> list[Recording]:
        """Forget everything, and return what is to be closed."""
        recordings = self.all()
        self._seen.clear()
        self._unrecorded.clear()
        self._recorded.clear()
        self.newest = None
        return recordings


class History:
    """Compares what is recorded with what was recorded before, and keeps the newest causes."""

    def __init__(self, name: str, source: Source) -> None:
        self._name = name
        self._source = source
        self._made = 0
        self.notes: deque[RecordingNote] = deque(maxlen=RECORDINGS_KEPT)
        self.warm_up_ms: float | None = None
        """Host time of the last call without a graph, since the last recording."""
        self._places: dict[ShapeKey, bytes] = {}
        """Where the newest recording of each shape reads its static inputs."""
        self._tensors: tuple[int, ...] = ()
        """Which tensors these were in the call recorded last."""
        self._why_anew: str | None = None

    def forget(self, why: str) -> None:
        """Note that every recording goes, and why they are made once more."""
        if self.notes:
            self._why_anew = why
        self._places.clear()

    def add(
        self,
        started: float,
        layout: Layout,
        seen: Seen,
        found: Found,
        args: Sequence[Any],
        recording: Recording,
    ) -> str:
        """Note a recording, just made and not in the table yet; returns the code of its cause."""
        shape, tensors = seen.key[0], tuple(id(args[i]) for i in layout.parameters)
        note = RecordingNote(
            *self._compare(layout, seen, found, args, tensors),
            recording.copied_bytes,
            recording.slot,
            (time.perf_counter() - started) * 1e3,
            self.warm_up_ms,
        )
        self.notes.append(note)
        self._made += 1
        log.info("%s: recording %d made: %s", self._source.of(self._name), self._made, note.detail)
        tracing.add_recording(self._name, self._made, note, self._source)
        self.warm_up_ms = self._why_anew = None
        self._places.pop(shape, None)
        self._places[shape] = found.places  # the newest comes last
        self._tensors = tensors
        return note.cause

    def _compare(
        self,
        layout: Layout,
        seen: Seen,
        found: Found,
        args: Sequence[Any],
        tensors: tuple[int, ...],
    ) -> tuple[str, str]:
        def names(positions: Sequence[int]) -> str:
            return describe((layout.infos[i] for i in positions), _NAMED)

        shape = seen.key[0]
        if seen.recordings.get(found.values):
            return "held", (
                "results of earlier calls are still referenced, or wait for their backward: one more recording beside theirs"
            )
        if self._why_anew is not None:
            return "anew", self._why_anew
        if not self._places:
            return "first", "the first call after the warm-up"
        if shape not in self._places:
            changed = layout.changed(next(reversed(self._places)), shape)
            what = names(changed) if changed else "modes of torch"
            return "shape", f"the first call with this value or layout of {what}"
        pairs = zip(array("q", self._places[shape]), array("q", found.places), strict=True)
        moved = [i for i, (a, b) in zip(layout.checked, pairs, strict=True) if a != b]
        if not moved:
            values = names([i for i in layout.pooled if args[i].numel()])
            if not values:
                return (
                    "anew",
                    "memory was laid out anew, for a larger call or for gradients that are kept",
                )
            return "memory", f"values of other partitions lie elsewhere: {values}"
        known = zip(layout.parameters, self._tensors, tensors, strict=False)
        others = [i for i, a, b in known if a != b]
        if others and not found.copied:
            return "other tensors", f"the first call with other tensors for {names(others)}"
        what = "moved, and copied" if found.copied else "moved"
        return "moved", f"{what}: {describe_tensors(layout.infos, args, moved, _NAMED)}"
