"""`RecordingTable`: the recordings of one partition by signature, and how many there may be.

Note [Parameters that are gone]
    Modules of one class share compiled code, and each has recordings of its own, which must not outlive it: graphs and
    results of every model that a process ever trained would add up. Recordings know their parameters' storages by weak
    references (a weak reference to a tensor would be in the way of `torch.utils.swap_tensors`). Before another set is
    recorded, those go whose parameters are gone, the longest unused first. A few stay: an allocator gives addresses
    again, and a parameter that comes back to where it lay finds its recording. Recordings of which somebody holds
    outputs stay, too: a backward may read them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cgpass.errors import StaticInputMovedError
from cgpass.reason import CallReasons
from cgpass.runtime.holders import Holder, holders_of
from cgpass.runtime.limits import Limits, Reached
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey
from cgpass.runtime.stationary import Watch
from cgpass.runtime.unsettled import Unsettled
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

_IDLE_FACTOR = 8
"""A recording unused for this many times the limit's number of calls may give way to a new one."""

_ORPHANS_KEPT = 4
"""Sets whose parameters are gone that stay recorded. See Note [Parameters that are gone]."""

_SHAPES_KEPT = 1024
"""Shapes without a recording whose warm-ups are remembered."""

_SETS_KEPT = 4096
"""Sets of parameters whose warm-up is remembered."""


@dataclass
class _Shape:
    """Everything known of one shape key."""

    num_warmups: int = 0
    sets: dict[StaticKey, list[Recording]] = field(default_factory=dict)
    watches: dict[StaticKey, Watch] = field(default_factory=dict)
    """By addresses of parameters."""
    draws: list[int] = field(default_factory=list)
    """How far random operators draw from where the partition begins."""
    lost: bool = False
    """Whether sets of it went with their parameters."""
    objects: tuple[Any, ...] = ()
    """Those that the key knows by identity, kept alive so that no other object takes their place."""

    def recordings(self) -> list[Recording]:
        return [recording for members in self.sets.values() for recording in members]


class RecordingTable:
    """Shape key -> static key -> recordings, oldest first.

    Nothing is dropped for a call that would itself be dropped next: past a limit calls run plainly and known
    signatures keep replaying. Only what was not used for long makes room.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        limits: Limits,
        stats: CallStats,
        *,
        on_moved: str,
        other_sets: bool = False,
        on_skip: str = "warn",
        reasons: CallReasons | None = None,
    ) -> None:
        """An empty table.

        Args:
            name: Of the partition, for messages.
            layout: Of its inputs.
            limits: How many recordings there may be.
            stats: Where events are counted, and the clock of what is idle.
            on_moved: "rerecord", "error" or "off".
            other_sets: Whether other tensors in the parameters' places are another module's that shares the code: no
                move. Else they are one.
            on_skip: "warn", "raise" or "silent".
            reasons: Told what is new in calls.
        """
        self._name = name
        self._layout = layout
        self._limits = limits
        self._stats = stats
        self._on_moved = on_moved
        self._other_sets = other_sets
        level = logging.WARNING if on_skip == "warn" else logging.INFO
        self._unsettled = Unsettled(name, layout, limits, stats, level, reasons)
        self._shapes: dict[ShapeKey, _Shape] = {}
        self._seen: dict[int, int] = {}
        """Which object each parameter was, by `id`: a reference, weak or not, would be in the user's way."""
        self._newest: StaticKey | None = None
        self._places: dict[tuple[Holder, ...], StaticKey] = {}
        """Where the tensors of each set lay when `on_moved="error"` saw it first, by who holds them."""
        self._warm_sets: set[tuple[ShapeKey, int]] = set()
        self._was_recorded = False
        """Whether anything was recorded since all was forgotten: parameters move only then."""
        self.reached = Reached(name, layout.infos, limits, stats)

    def find(self, shape_key: ShapeKey, static_key: StaticKey) -> list[Recording]:
        """Recordings of a signature, oldest first."""
        shape = self._shapes.get(shape_key)
        return [] if shape is None else shape.sets.get(static_key, [])

    def all(self) -> list[Recording]:
        """Every recording."""
        return [recording for shape in self._shapes.values() for recording in shape.recordings()]

    def retire(self) -> bool:
        """Retire every recording; returns whether there was one."""
        recordings = self.all()
        for recording in recordings:
            recording.retire()
        return bool(recordings)

    def has_recordings(self, shape_key: ShapeKey) -> bool:
        """Whether a shape was ever recorded."""
        shape = self._shapes.get(shape_key)
        return shape is not None and bool(shape.sets)

    def num_warmups(self, shape_key: ShapeKey) -> int:
        """Warm-up calls that a shape has had."""
        shape = self._shapes.get(shape_key)
        return 0 if shape is None else shape.num_warmups

    def is_warm(self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]) -> bool:
        """Whether a call of this signature may be recorded: its shape and its set of parameters were called before.

        Other tensors in the parameters' places warm up once, too. Layers that share one compiled function are so
        recorded in the order in which they run, and whoever makes new parameters for every call gets no recording for
        each. A parameter that moved is no other tensor.
        """
        shape = self._shapes.get(shape_key)
        if shape is None or shape.num_warmups < self._limits.num_warmup_calls:
            return False
        if self._is_warm_set(shape_key, static_key):
            return True
        if self._unsettled.freed(static_key, args):
            return False  # not before this place comes back
        return bool(self._known(self._parameters_moved(self._newest, static_key), args))

    def identities(self, args: Sequence[Any]) -> dict[int, int]:
        """Which objects a call's parameters are."""
        return {i: id(args[i]) for i in self._layout.parameters}

    def add_warmup(
        self, shape_key: ShapeKey, static_key: StaticKey, identities: Mapping[int, int]
    ) -> None:
        """Count one warm-up call."""
        if shape_key not in self._shapes and len(self._shapes) >= _SHAPES_KEPT:
            self._forget_a_shape()
        self._shapes.setdefault(shape_key, _Shape()).num_warmups += 1
        self._note_set(shape_key, static_key, identities)

    def note_unknown(
        self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]
    ) -> list[int]:
        """Note a call that is no replay; returns parameters that are better copied from now on."""
        if self._is_warm_set(shape_key, static_key):
            return []
        same = self._seen == self.identities(args)
        return self._unsettled.note(shape_key, static_key, args, same_objects=same)

    def note_full(
        self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]
    ) -> list[int]:
        """Note a call that there was no room for; returns parameters that are better copied from now on."""
        del shape_key
        return self._unsettled.note_full(static_key, args)

    def _forget_a_shape(self) -> None:
        """Forget the oldest shape that was never recorded; there are fewer recorded ones than the limit."""
        oldest = next((key for key, shape in self._shapes.items() if not shape.sets), None)
        if oldest is not None:
            del self._shapes[oldest]

    def _note_set(
        self, shape_key: ShapeKey, static_key: StaticKey, identities: Mapping[int, int]
    ) -> None:
        self._newest = static_key
        self._seen.update(identities)
        if len(self._warm_sets) >= _SETS_KEPT:
            self._warm_sets.clear()
            self._places.clear()
        self._warm_sets.add((shape_key, hash(self._layout.parameters_of(static_key))))

    def _is_warm_set(self, shape_key: ShapeKey, static_key: StaticKey) -> bool:
        return (shape_key, hash(self._layout.parameters_of(static_key))) in self._warm_sets

    def draws(self, shape_key: ShapeKey) -> list[int]:
        """How far a shape's random operators draw from where the partition begins: for the caller to fill and read."""
        shape = self._shapes.get(shape_key)
        return [] if shape is None else shape.draws

    def watch(self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]) -> Watch:
        """What is known of a signature's copied inputs, wherever other recordings put what they hand it."""
        watches = self._shapes.setdefault(shape_key, _Shape()).watches
        parameters = self._layout.parameters_of(static_key)
        if parameters not in watches:
            if len(watches) >= _SETS_KEPT:
                watches.clear()
            watches[parameters] = Watch(self._layout.may_stay(args))
        return watches[parameters]

    def add(
        self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any], recording: Recording
    ) -> list[Recording]:
        """Keep a recording; returns all of its signature."""
        shape = self._shapes.setdefault(shape_key, _Shape())
        shape.objects = tuple(args[i] for i in self._layout.objects)
        recording.note_parameters(args[i] for i in self._layout.parameters)
        members = shape.sets.setdefault(static_key, [])
        members.append(recording)
        self._was_recorded = True
        self._note_set(shape_key, static_key, self.identities(args))
        return members

    def remove(self, recording: Recording) -> None:
        """Forget one recording."""
        for shape in self._shapes.values():
            for key, members in list(shape.sets.items()):
                if recording in members:
                    members.remove(recording)
                    if not members:
                        del shape.sets[key]

    def drop_recordings(self) -> list[Recording]:
        """Forget recordings, but not what is warm; returns what is to be closed."""
        recordings = self.all()
        for shape in self._shapes.values():
            shape.sets.clear()
        return recordings

    def clear(self) -> list[Recording]:
        """Forget everything, and return what is to be closed."""
        recordings = self.all()
        self._shapes.clear()
        self._seen.clear()
        self._places.clear()
        self._warm_sets.clear()
        self._newest = None
        self._was_recorded = False
        self.reached.clear()
        return recordings

    # ---- limits

    def go_on_from(self, other: "RecordingTable") -> None:
        """Take over how often parameters moved, of a table whose layout of inputs was another."""
        self.reached.go_on_from(other.reached)

    def make_room(
        self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]
    ) -> tuple[bool, list[Recording]]:
        """Whether this signature may have one more recording, and the idle ones that gave way, to be closed.

        Raises:
            StaticInputMovedError: A parameter or buffer moved and `on_moved` is "error".
        """
        shape = self._shapes.get(shape_key)
        moved = self._moved(shape, static_key)
        self._refuse_moved(moved, static_key, args)
        dropped = [] if self.find(shape_key, static_key) else self._drop_orphans()
        if shape is None or not shape.sets:
            room, idle = self._room_for_shape(shape_key)
            if room and shape is not None and shape.lost:
                room = self._count_rerecord(moved, args)
            return room, dropped + idle
        limit = self._limits.max_static_sets
        if len(shape.recordings()) >= limit:
            idle = self._drop_idle_set(shape, limit)
            if not idle:
                self.reached.note_moved(self._known(moved, args))
                self.reached.refuse("max_static_sets", limit, moved, args)
                return False, dropped
            dropped += idle
        if self._is_warm_set(shape_key, static_key):
            return True, dropped  # these parameters came before: nothing moved
        return self._count_rerecord(moved, args), dropped

    def _room_for_shape(self, shape_key: ShapeKey) -> tuple[bool, list[Recording]]:
        limit = self._limits.max_recordings
        recorded = [key for key, shape in self._shapes.items() if shape.sets]
        if len(recorded) < limit:
            return True, []
        for key in recorded:
            recordings = self._shapes[key].recordings()
            if self._is_idle(recordings, limit):
                del self._shapes[key]
                return True, recordings
        changed = self._layout.changed(recorded[-1], shape_key)
        self.reached.refuse("max_recordings", limit, (), (), changed)
        return False, []

    def _moved(self, shape: _Shape | None, static_key: StaticKey) -> list[int]:
        """Parameters and buffers whose address differs from the newest recording's of a shape, or of all if it has none."""
        if shape is None or not shape.sets:
            return self._parameters_moved(self._newest, static_key)
        if static_key in shape.sets:
            return []
        return self._parameters_moved(next(reversed(shape.sets)), static_key)

    def _parameters_moved(self, old: StaticKey | None, new: StaticKey) -> list[int]:
        return [] if old is None else self._layout.parameters_moved(old, new)

    def _refuse_moved(
        self, moved: Sequence[int], static_key: StaticKey, args: Sequence[Any]
    ) -> None:
        if self._on_moved != "error":
            return
        if not self._was_recorded:
            self._places.clear()
            moved = []
        if self._other_sets:
            holders = holders_of([args[i] for i in self._layout.parameters])
            before = self._places.setdefault(holders, static_key)
            moved = self._parameters_moved(before, static_key)
        if moved:
            self.reached.note_moved(moved)
            names = self.reached.describe(moved, args)
            raise StaticInputMovedError(
                f"{self._name}: static inputs moved or were replaced since they were recorded: {names}. Write new values "
                "into parameters and buffers (copy_, load_state_dict without assign=True), or use "
                'static_input_check="rerecord".'
            )

    def _known(self, moved: Sequence[int], args: Sequence[Any]) -> list[int]:
        """The moved inputs if all parameters are the very tensors of the last call, none if this is another set.

        Of a set that is gone, some objects' `id`s come back in the next one: that alone is no move.
        """
        return list(moved) if self._seen == self.identities(args) else []

    def _count_rerecord(self, moved: Sequence[int], args: Sequence[Any]) -> bool:
        """Allow a recording for moved inputs; a set of other tensors seen for the first time is none."""
        known = self._known(moved, args)
        return not known or self.reached.may_rerecord(known, args)

    def _drop_orphans(self) -> list[Recording]:
        """See Note [Parameters that are gone]."""
        found = [
            (max(recording.last_used for recording in recordings), shape_key, key)
            for shape_key, shape in self._shapes.items()
            for key, recordings in shape.sets.items()
            if all(recording.is_orphaned for recording in recordings)
        ]
        found.sort(key=lambda orphan: orphan[0])
        dropped: list[Recording] = []
        for _, shape_key, key in found[: max(0, len(found) - _ORPHANS_KEPT)]:
            shape, parameters = self._shapes[shape_key], self._layout.parameters_of(key)
            dropped += shape.sets.pop(key)
            shape.watches.pop(parameters, None)
            shape.lost = True
            self._warm_sets.discard(
                (shape_key, hash(parameters))
            )  # recorded there again, it counts
        return dropped

    def _drop_idle_set(self, shape: _Shape, limit: int) -> list[Recording]:
        for key, recordings in shape.sets.items():
            if self._is_idle(recordings, limit):
                return shape.sets.pop(key)
        return []

    def _is_idle(self, recordings: Iterable[Recording], limit: int) -> bool:
        last_used = max((r.last_used for r in recordings), default=0)
        return self._stats.calls - last_used > _IDLE_FACTOR * limit
