"""The keys of one partition that were seen, why they were new, and the recordings of each."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cgpass import torch_private
from cgpass.runtime.inputs import ShapeKey
from cgpass.runtime.recording import Recording

_KEYS_KEPT: Final = 2048
"""The newest keys without a recording that stay known, and never more than twice as many do: a bound on memory. If it
were `max_recordings`, a few more sizes that take turns would never be seen twice."""
Cause = tuple[str, str, str | None]
"""See `RecordingNote`: code, words, and the user's line."""
LAID_OUT_ANEW: Final = (
    "anew",
    "memory was laid out anew, for a larger call, gradients that are kept, calls of a second thread, or a model dropped",
    None,
)

Key = tuple[ShapeKey, bytes]
"""The computation's key, and places of the static inputs: see `Found.places`."""


@dataclass(eq=False)
class Seen:
    """A key that was seen, wherever the values of other recordings lay."""

    key: Key
    storages: dict[int, torch_private.WeakStorage]
    """Of the static inputs that are read in place, by what tells them apart."""
    draws: list[int]
    """Steps that random operators draw from where the partition begins: learnt in a call without a graph."""
    objects: tuple[object, ...] = ()
    """Those that the key knows by identity, kept alive so that no other object takes their place."""
    cause: Cause = ("", "", None)
    """Cause of its next recording."""
    left_plain: tuple[str, str] | None = None
    """Reason for running its calls without a graph, if any: a code, and in words."""
    recordings: dict[bytes, list[Recording]] = field(default_factory=dict)
    """By the addresses of other recordings' values, oldest first."""

    @property
    def made_for(self) -> tuple[int, ...]:
        """Identities of these storages."""
        return tuple(self.storages)

    @property
    def is_gone(self) -> bool:
        """True if something that it reads in place exists no more."""
        return any(storage.expired() for storage in self.storages.values())


class RecordingTable:
    """Key -> addresses of other recordings' values -> recordings.

    No recording gives way to one of another key: they go when a storage that they read in place is gone.
    Keys without a recording are forgotten with their storages, too, and all but the newest.
    """

    def __init__(self, max_recordings: int) -> None:
        self._max_recordings = max_recordings
        self._seen: dict[Key, Seen] = {}
        """Least recently remembered first."""
        self._limit = 64
        """Keys that may be known before some are forgotten."""

    def get(self, shape: ShapeKey, places: bytes) -> Seen | None:
        """Return the entry of a key, if it was seen."""
        return self._seen.get((shape, places))

    def recordings(self, shape: ShapeKey, places: bytes, values: bytes) -> list[Recording]:
        """Those for a call that copies nothing that may be read in place."""
        seen = self._seen.get((shape, places))
        return [] if seen is None else seen.recordings.get(values, [])

    def copying(self, shape: ShapeKey, places: bytes) -> Seen | None:
        """The newest entry with recordings that read static inputs in these places, or copy them; None if there is none."""
        now = array("q", places)
        for seen in reversed(self._seen.values()):
            if seen.recordings and seen.key[0] == shape:
                reads = array("q", seen.key[1])
                if all(at in (0, here) for at, here in zip(reads, now, strict=True)):
                    return seen
        return None

    def seen(self) -> list[Seen]:
        """Return the entries of all keys."""
        return [*self._seen.values()]

    def all(self) -> list[Recording]:
        """Every recording."""
        return [r for seen in self.seen() for each in seen.recordings.values() for r in each]

    def has_room(self, storages: tuple[int, ...]) -> bool:
        """Tell whether one more recording may be made for a set of storages."""
        return sum(r.made_for == storages for r in self.all()) < self._max_recordings

    def newest(self, shape: ShapeKey | None = None) -> Key | None:
        """Return the key that was remembered last, of all or of one shape."""
        return next((key for key in reversed(self._seen) if shape in (None, key[0])), None)

    def remember(self, new: Seen) -> Seen:
        """Note that a key was seen; returns its entry."""
        found = self._seen[new.key] = self._seen.pop(new.key, new)
        found.storages = new.storages
        if len(self._seen) > self._limit:
            self._forget_unrecorded()
        return found

    def _forget_unrecorded(self) -> None:
        unrecorded = [seen for seen in self.seen() if not seen.recordings]
        alive = [seen for seen in unrecorded if not seen.is_gone]
        for seen in {*unrecorded}.difference(alive[-_KEYS_KEPT:]):
            del self._seen[seen.key]
        self._limit = len(self._seen) + 64 + min(len(alive), _KEYS_KEPT)

    def drop(
        self, wanted: Callable[[Seen, Recording], bool], cause: Cause | None = None
    ) -> list[Recording]:
        """Forget some recordings, but not their keys, whose next ones have a cause; returns what is to be closed."""
        dropped = []
        for seen in self.seen():
            for values, members in list(seen.recordings.items()):
                gone = [recording for recording in members if wanted(seen, recording)]
                members[:] = [recording for recording in members if recording not in gone]
                dropped += gone
                if gone and cause:
                    seen.cause = cause
                if not members:
                    del seen.recordings[values]
        return dropped

    def drop_gone(self) -> list[Recording]:
        """Forget keys whose storages are gone; returns recordings that read what is, unless outputs of these are held."""
        dropped = self.drop(
            lambda seen, r: (seen.is_gone or r.reads_what_is_gone()) and not r.memory.any_held()
        )
        self._forget_unrecorded()
        return dropped

    def clear(self) -> list[Recording]:
        """Forget everything, and return what is to be closed."""
        recordings = self.all()
        self._seen.clear()
        return recordings
