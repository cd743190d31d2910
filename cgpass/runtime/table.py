"""`RecordingTable`: the keys of one partition that were seen, and the recordings of each."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cgpass import _torch
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import ShapeKey

_KEYS_KEPT: Final = 4096
"""Keys of one set of storages that were seen once and are remembered: a bound on memory."""

Key = tuple[ShapeKey, bytes]
"""What is computed, and where the static inputs are read: see `rule.Found.places`."""


@dataclass(eq=False)
class Seen:
    """A key that was seen, wherever the values of other recordings lay."""

    key: Key
    storages: tuple[_torch.WeakStorage, ...]
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
    Keys without a recording are forgotten with their storages, too, and of one set of storages all but the newest.
    """

    def __init__(self, max_recordings: int) -> None:
        """An empty table.

        Args:
            max_recordings: Of one set of storages.
        """
        self._max_recordings = max_recordings
        self._seen: OrderedDict[Key, Seen] = OrderedDict()
        self._unrecorded: dict[tuple[int, ...], OrderedDict[Key, Seen]] = {}
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
        others = self._unrecorded.setdefault(new.identities, OrderedDict())
        if len(others) >= _KEYS_KEPT:
            old, _ = others.popitem(last=False)
            del self._seen[old]
        others[new.key] = self._seen[new.key] = new
        return new

    def is_full_of_unseen(self, identities: tuple[int, ...]) -> bool:
        """Whether as many keys of one set of storages as may be recorded were seen once, and not again."""
        return len(self._unrecorded.get(identities, ())) >= self._max_recordings

    def recorded_shape(self) -> ShapeKey | None:
        """What was computed by the newest recording, if there is one."""
        return next((s.key[0] for s in reversed(self._seen.values()) if s.recordings), None)

    def renew(
        self, seen: Seen, storages: tuple[_torch.WeakStorage, ...], identities: tuple[int, ...]
    ) -> None:
        """Note that a key was seen once more, and which storages lie in its places now."""
        if self._take_out(seen):
            self._unrecorded.setdefault(identities, OrderedDict())[seen.key] = seen
        seen.storages, seen.identities = storages, identities

    def _take_out(self, seen: Seen) -> bool:
        """Have a key no longer among those without a recording; returns whether it was."""
        others = self._unrecorded.get(seen.identities, {})
        found = others.pop(seen.key, None) is not None
        if found and not others:
            del self._unrecorded[seen.identities]
        return found

    def _forget_what_is_gone(self) -> None:
        for key, seen in list(self._seen.items()):
            if seen.is_gone and not seen.recordings:
                self._forget(key)
        self._watermark = max(self._max_recordings, 2 * len(self._seen))

    def _forget(self, key: Key) -> None:
        self._take_out(self._seen.pop(key))

    def add(self, seen: Seen, values: bytes, recording: Recording) -> list[Recording]:
        """Keep a recording; returns all that read the same memory."""
        self._take_out(seen)
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
        for key, seen in list(self._seen.items()):
            if seen.is_gone and not seen.recordings:
                self._forget(key)
        return dropped

    def clear(self) -> list[Recording]:
        """Forget everything, and return what is to be closed."""
        recordings = self.all()
        self._seen.clear()
        self._unrecorded.clear()
        self._recorded.clear()
        self.newest = None
        return recordings
