"""The keys of one partition that were seen, the recordings of each, and why these were made."""

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cgpass import torch_private
from cgpass.runtime.recorder import WarmUp
from cgpass.runtime.recording import Recording
from cgpass.runtime.rule import Found
from cgpass.runtime.signature import Layout, ShapeKey, describe, describe_tensor
from cgpass.telemetry import tracing
from cgpass.telemetry.summaries import RECORDINGS_KEPT, RecordingNote
from cgpass.telemetry.tracing import Source

log = logging.getLogger(__name__)

_NAMED: Final = 3
"""Inputs that a cause names."""
_KEYS_KEPT: Final = 4096
"""Keys without a recording that are remembered: a bound on memory."""

Key = tuple[ShapeKey, bytes]
"""What is computed, and where the static inputs are read: see `rule.Found.places`."""


@dataclass(eq=False)
class Seen:
    """A key that was seen, wherever the values of other recordings lay."""

    key: Key
    storages: tuple[torch_private.WeakStorage, ...]
    """Of the static inputs that are read in place."""
    identities: tuple[int, ...]
    """The same, to tell one from another."""
    draws: list[int]
    """How far random operators draw from where the partition begins: learnt in a call without a graph."""
    objects: tuple[object, ...] = ()
    """Those that the key knows by identity, kept alive so that no other object takes their place."""
    left_plain: str | None = None
    """Why its calls run without a graph, if they do."""
    recordings: dict[bytes, list[Recording]] = field(default_factory=dict)
    """By the addresses of other recordings' values, oldest first."""

    def all(self) -> list[Recording]:
        """Every recording of this key."""
        return [recording for members in self.recordings.values() for recording in members]

    @property
    def is_gone(self) -> bool:
        """Whether something that it reads in place exists no more."""
        return any(storage.expired for storage in self.storages)


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
        self._watermark = max_recordings
        self.newest: Key | None = None
        """The key that was remembered last."""

    def get(self, key: Key) -> Seen | None:
        """What is known of a key, if it was seen."""
        return self._seen.get(key)

    def all(self) -> list[Recording]:
        """Every recording."""
        return [recording for seen in self._seen.values() for recording in seen.all()]

    def has_room(self, storages: tuple[int, ...]) -> bool:
        """Whether one more recording may be made for a set of storages."""
        return self._recorded[storages] < self._max_recordings

    def remember(self, new: Seen) -> Seen:
        """Note that a key was seen; returns what is known of it."""
        self.newest = new.key
        found = self._seen.get(new.key)
        if found is not None:
            self.renew(found, new.storages, new.identities)
            return found
        if len(self._seen) >= self._watermark:
            self._forget_what_is_gone()
        if len(self._unrecorded) >= _KEYS_KEPT:
            self._forget(next(iter(self._unrecorded)))
        self._unrecorded[new.key] = self._seen[new.key] = new
        return new

    def is_full_of_unseen(self, identities: tuple[int, ...]) -> bool:
        """Whether as many keys of one set of storages as may be recorded were seen once, and not again."""
        number = sum(seen.identities == identities for seen in self._unrecorded.values())
        return number >= self._max_recordings

    def recorded_shape(self) -> ShapeKey | None:
        """What was computed by the newest recording, if there is one."""
        return next((s.key[0] for s in reversed(self._seen.values()) if s.recordings), None)

    def renew(
        self,
        seen: Seen,
        storages: tuple[torch_private.WeakStorage, ...],
        identities: tuple[int, ...],
    ) -> None:
        """Note that a key was seen once more, and which storages lie in its places now."""
        if self._unrecorded.pop(seen.key, None) is not None:
            self._unrecorded[seen.key] = seen
        seen.storages, seen.identities = storages, identities

    def _forget_what_is_gone(self) -> None:
        for key, seen in list(self._seen.items()):
            if seen.is_gone and not seen.recordings:
                self._forget(key)
        self._watermark = max(self._max_recordings, 2 * len(self._seen))

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
        dropped: list[Recording] = []
        for seen in self._seen.values():
            for values, members in list(seen.recordings.items()):
                gone = [recording for recording in members if wanted(recording)]
                dropped += gone
                self._recorded.subtract(recording.made_for for recording in gone)
                left = [recording for recording in members if recording not in gone]
                if left:
                    seen.recordings[values] = left
                else:
                    del seen.recordings[values]
        self._recorded = +self._recorded
        return dropped

    def drop_gone(self) -> list[Recording]:
        """Forget recordings that read storages which are gone, unless their outputs are held."""
        gone = {id(r) for seen in self._seen.values() if seen.is_gone for r in seen.all()}
        dropped = self.drop(lambda r: id(r) in gone and not r.memory.any_held())
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

    def __init__(self, name: str, warm_ups: WarmUp, source: Source) -> None:
        self._name = name
        self._warm_ups = warm_ups
        self._source = source
        self._causes: Counter[str] = Counter()
        self.notes: deque[RecordingNote] = deque(maxlen=RECORDINGS_KEPT)
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
        note = RecordingNote(
            *self._compare(layout, seen, found, args),
            recording.copied_bytes,
            recording.slot,
            (time.perf_counter() - started) * 1e3,
            recording.instantiate_ms,
            self._warm_ups.last_ms,
        )
        self.notes.append(note)
        self._announce(note)
        self._warm_ups.last_ms = self._why_anew = None
        shape = seen.key[0]
        self._places.pop(shape, None)
        self._places[shape] = found.places  # the newest comes last
        self._tensors = _tensors(layout, args)
        return note.cause

    def _announce(self, note: RecordingNote) -> None:
        self._causes[note.cause] += 1
        number, times = self._causes.total(), self._causes[note.cause]
        often = f" (for moved inputs: {times} so far)" if note.cause == "moved" else ""
        name = self._source.of(self._name)
        log.info("%s: recording %d made%s: %s", name, number, often, note.detail)
        tracing.add_recording(self._name, number, note, self._source)

    def _compare(
        self, layout: Layout, seen: Seen, found: Found, args: Sequence[Any]
    ) -> tuple[str, str]:
        if seen.recordings.get(found.values):
            return "held", (
                "results of earlier calls are still referenced, or wait for their backward: one more recording beside theirs"
            )
        if self._why_anew is not None:
            return "anew", self._why_anew
        shape = seen.key[0]
        if not self._places:
            return "first", "the first call after the warm-up"
        if shape not in self._places:
            changed = layout.changed(next(reversed(self._places)), shape)
            names = _names(layout, changed) if changed else "modes of torch"
            return "shape", f"the first call with this value or layout of {names}"
        before = dict(zip(layout.checked, array("q", self._places[shape]), strict=True))
        now = dict(zip(layout.checked, array("q", found.places), strict=True))
        moved = [i for i in now if now[i] != before[i]]
        if not moved:
            names = _names(layout, [i for i in layout.pooled if args[i].numel()])
            return "memory", f"values of other partitions lie elsewhere: {names}"
        pairs = zip(layout.parameters, self._tensors, _tensors(layout, args), strict=False)
        others = [i for i, a, b in pairs if a != b]
        if others and not found.copied:
            return "other tensors", _others(layout, others)
        texts = [_move(layout, i, args[i], before[i], now[i]) for i in moved[:_NAMED]]
        left = len(moved) - _NAMED
        return "moved", ", ".join(texts) + (f", and {left} more" if left > 0 else "")


def _others(layout: Layout, new: Sequence[int]) -> str:
    if len(new) == len(layout.parameters) > _NAMED:
        return "the first call with these parameters and buffers"
    return f"the first call with {'this tensor' if len(new) == 1 else 'these tensors'} for {_names(layout, new)}"


def _move(layout: Layout, i: int, value: Any, before: int, now: int) -> str:
    where = (
        f"moved from {before:#x} to {now:#x}" if now and before else "lies at new places: copied"
    )
    return f"{describe_tensor(layout.infos[i], value)} {where}"


def _names(layout: Layout, positions: Sequence[int]) -> str:
    return describe((layout.infos[i] for i in positions), _NAMED)


def _tensors(layout: Layout, args: Sequence[Any]) -> tuple[int, ...]:
    """Which tensors a call's static inputs are."""
    return tuple(id(args[i]) for i in layout.parameters)
