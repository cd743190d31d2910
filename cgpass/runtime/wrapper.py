"""`CUDAGraphWrapper`: records a callable once per signature and replays it."""

import dataclasses
import enum
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass.errors import CaptureError, StaticInputMovedError
from cgpass.inputs import InputInfo, InputKind
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.owner import Limits, Owner
from cgpass.runtime.recording import Placeholder, Recording
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe
from cgpass.telemetry import CallStats, new_call_stats

log = logging.getLogger(__name__)

_MISSES_UNTIL_COPIED = 8
"""Calls in a row in which a pooled input lay outside the pool before it is copied from then on."""
_IDLE_FACTOR = 8
"""A recording unused for this many times the limit's number of calls may give way to a new one."""


class Action(enum.Enum):
    """What one call of a wrapper does."""

    WARM_UP = "warm up"
    RECORD = "record"
    REPLAY = "replay"
    PLAIN = "run plainly"


class Room(enum.Enum):
    """Whether one more recording may be made."""

    FREE = "free"
    FULL = "full"


# Note [What a call does]
#   usable: no failed capture, not closed, no foreign capture on this stream, pooled inputs in the pool
#   warm:   this shape had its warm-up calls
#   safe:   a recording of this signature exists whose replay overwrites nothing that is held
#   room:   limits allow one more recording
# The first row that fits decides; None fits anything.
_TABLE: tuple[tuple[bool | None, bool | None, bool | None, Room | None, Action], ...] = (
    # usable, warm, safe, room
    (False, None, None, None, Action.PLAIN),
    (True, False, None, Room.FULL, Action.PLAIN),
    (True, False, None, None, Action.WARM_UP),
    (True, True, True, None, Action.REPLAY),
    (True, True, False, Room.FREE, Action.RECORD),
    (True, True, False, Room.FULL, Action.PLAIN),
)


def decide(usable: bool, warm: bool, safe: bool, room: Room) -> Action:
    """Look a call up in the table of Note [What a call does]."""
    for *row, action in _TABLE:
        given = (usable, warm, safe, room)
        if all(want is None or want == have for want, have in zip(row, given, strict=True)):
            return action
    raise AssertionError("the table covers every call")


@dataclass
class _Shape:
    """Everything recorded for one shape key."""

    num_warmups: int = 0
    sets: dict[StaticKey, list[Recording]] = field(default_factory=dict)


class CUDAGraphWrapper:
    """Runs a callable from recordings, one per signature. The runtime's part: see `cgpass.CUDAGraphWrapper`."""

    def __init__(
        self,
        fn: BoxedCallable,
        infos: Sequence[InputInfo],
        owner: Owner,
        *,
        name: str = "partition",
        limits: Limits = Limits(),  # noqa: B008  frozen
        static_input_check: str = "rerecord",
        on_skip: str = "warn",
        opaque: bool = False,
        check_layout: bool = False,
    ) -> None:
        """Wrap `fn`.

        Args:
            fn: Takes one list of inputs and returns a sequence of outputs. Writes only inputs marked `mutated`.
            infos: Its inputs.
            owner: Pool, driver and liveness shared with other wrappers.
            name: For messages.
            limits: How much to record.
            static_input_check: "rerecord", "error" or "off", as in `cgpass.Options`.
            on_skip: "warn", "raise" or "silent", as in `cgpass.Options`.
            opaque: Whether `fn`'s kernels bypass aten.
            check_layout: Whether sizes, strides and dtypes belong to the signature; needed where no guard covers them.
        """
        self.name = name
        self.stats: CallStats = new_call_stats()
        self.failure: str | None = None
        self._fn = fn
        self._owner = owner
        self._limits = limits
        self._check = static_input_check
        self._on_skip = on_skip
        self._opaque = opaque
        self._check_layout = check_layout
        self._layout = self._new_layout(infos)
        self._shapes: dict[ShapeKey, _Shape] = {}
        self._placeholders: dict[tuple[int, Any], Placeholder] = {}
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._misses = (0, 0)
        self._num_rerecords = 0
        self._warned_limit = False
        self._last: tuple[ShapeKey, StaticKey, list[Recording]] | None = None
        owner.add(self)

    def _new_layout(self, infos: Sequence[InputInfo]) -> Layout:
        return Layout(infos, check_static=self._check != "off", check_layout=self._check_layout)

    # ---- a call

    def run(self, args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
        """Run one call.

        Args:
            args: The inputs; the list is emptied.

        Returns:
            The outputs, and the recording that made them (None if they were made plainly).
            **Lifetime:** outputs of a recording lie in the pool. They stay valid as long as somebody holds them,
            since no recording is replayed over held memory; placeholders and temporaries don't.
        """
        stats = self.stats
        stats.calls += 1
        layout = self._layout
        shape_key, static_key = layout.shape_key(args), layout.static_key(args)
        last = self._last
        if last is not None and last[0] == shape_key and last[1] == static_key:
            recordings = last[2]
        else:
            recordings = self._find(shape_key, static_key)
        if recordings and not self._owner.driver.is_capturing():
            youngest = self._owner.live.youngest()
            for recording in recordings:
                if recording.birth > youngest:
                    self._last = (shape_key, static_key, recordings)
                    return self._replay(recording, args), recording
        return self._without_replay(args, shape_key, static_key)

    def _find(self, shape_key: ShapeKey, static_key: StaticKey) -> list[Recording]:
        shape = self._shapes.get(shape_key)
        return [] if shape is None else shape.sets.get(static_key, [])

    def _replay(self, recording: Recording, args: list[Any]) -> list[Any]:
        stats = self.stats
        outputs = recording.run(args)
        args.clear()
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        recording.last_used = stats.calls
        if recording.own_outputs:
            self._owner.live.push(recording.birth, recording.held)
        return outputs

    def _without_replay(
        self, args: list[Any], shape_key: ShapeKey, static_key: StaticKey
    ) -> tuple[Sequence[Any], Recording | None]:
        shape = self._shapes.get(shape_key)
        num_warmups = 0 if shape is None else shape.num_warmups
        warm = num_warmups >= self._limits.num_warmup_calls
        usable = self._is_usable() and not (warm and self._has_strays(args))
        room = self._room(shape_key, static_key, args) if usable else Room.FULL
        action = decide(usable, warm, safe=False, room=room)
        if action is Action.RECORD:
            recording = self._try_record(args, shape_key, static_key)
            if recording is not None:
                return self._replay(recording, args), recording
            action = Action.PLAIN
        if action is Action.WARM_UP:
            outputs = self._fn(args)
            self._shapes.setdefault(shape_key, _Shape()).num_warmups += 1
            self.stats.warmups += 1
        else:
            outputs = self._fn(args)
            self.stats.plain_calls += 1
        return outputs, None

    def _is_usable(self) -> bool:
        if self.failure is not None or self._owner.closed:
            return False
        return not self._owner.driver.is_capturing()

    def _has_strays(self, args: Sequence[Any]) -> bool:
        """Whether a pooled input is not where a recording put it; if that goes on, it becomes a copied one."""
        strays = [
            i
            for i in self._layout.pooled
            if args[i].numel()
            and not self._owner.is_pool_storage(args[i].untyped_storage().data_ptr())
        ]
        if not strays:
            return False
        call = self.stats.calls
        in_a_row = self._misses[1] + 1 if self._misses[0] == call - 1 else 1
        self._misses = (call, in_a_row)
        if in_a_row < _MISSES_UNTIL_COPIED:
            return True
        infos = [
            dataclasses.replace(info, kind=InputKind.COPIED) if i in strays else info
            for i, info in enumerate(self._layout.infos)
        ]
        log.info("%s copies %s from now on", self.name, describe(infos[i] for i in strays))
        self.close()
        self._layout = self._new_layout(infos)
        return True

    # ---- recording

    def _try_record(
        self, args: list[Any], shape_key: ShapeKey, static_key: StaticKey
    ) -> Recording | None:
        try:
            recording = self._record(args)
        except Exception as error:  # noqa: BLE001  whatever a capture meets, the call must still be made
            return self._on_failure(error)
        sets = self._shapes.setdefault(shape_key, _Shape()).sets
        recordings = sets.setdefault(static_key, [])
        recordings.append(recording)
        self._last = (shape_key, static_key, recordings)
        for i in self._layout.parameters:
            self._seen[i] = weakref.ref(args[i])  # the user keeps parameters alive, not we
        return recording

    def _record(self, args: list[Any]) -> Recording:
        placeholders = {i: self._placeholder(i, args[i]) for i in self._layout.copied}
        staged = [placeholders[i].tensor if i in placeholders else a for i, a in enumerate(args)]
        for i, placeholder in placeholders.items():
            placeholder.target.copy_(placeholder.source(args[i]))
        graph, outputs = self._owner.driver.record(self._fn, list(staged), opaque=self._opaque)
        recording = Recording(
            graph,
            outputs,
            staged,
            placeholders,
            mutated=self._layout.mutated,
            birth=self._owner.next_birth(),
        )
        del outputs
        recording.seal()
        for tensor in recording.own_outputs:
            self._owner.add_pool_storage(tensor.untyped_storage().data_ptr())
        self.stats.recordings += 1
        log.info("%s: recording %d made", self.name, self.stats.recordings)
        return recording

    def _placeholder(self, index: int, value: torch.Tensor) -> Placeholder:
        """One placeholder per input and layout, shared by all recordings: each copies in before it replays."""
        key = (index, (tuple(value.size()), value.stride(), value.dtype))
        if key not in self._placeholders:
            self._placeholders[key] = Placeholder(value)
        return self._placeholders[key]

    def _on_failure(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        message = (
            f"{self.name} can't be captured and runs without a graph from now on: {self.failure}. "
            'Name the operator in options={"unsafe_ops": (...)} to capture the rest.'
        )
        if self._on_skip == "raise":
            raise CaptureError(message) from error
        if self._on_skip == "warn":
            log.warning("%s", message)

    # ---- limits

    def _room(self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]) -> Room:
        """Whether this signature may have one more recording; makes room by dropping what is idle."""
        limits = self._limits
        shape = self._shapes.get(shape_key)
        if shape is None:
            full = sum(bool(s.sets) for s in self._shapes.values()) >= limits.max_recordings
            return self._full("max_recordings", limits.max_recordings) if full and not self._drop_idle_shape() else Room.FREE
        if not shape.sets:
            return Room.FREE
        moved = self._moved_parameters(shape, static_key, args)
        if moved and self._check == "error":
            infos = [self._layout.infos[i] for i in moved]
            raise StaticInputMovedError(
                f"{self.name}: static input moved since it was recorded: {describe(infos)}. Keep parameters and "
                'buffers where they are, or use static_input_check="rerecord".'
            )
        num_recordings = sum(len(recordings) for recordings in shape.sets.values())
        if num_recordings >= limits.max_static_sets and not self._drop_idle_set(shape):
            return self._full("max_static_sets", limits.max_static_sets, moved)
        if any(self._is_same_object(i, args[i]) for i in moved):
            if self._num_rerecords >= limits.max_rerecords:
                return self._full("max_rerecords", limits.max_rerecords, moved)
            self._num_rerecords += 1
            self.stats.rerecordings += 1
            log.info(
                "%s records again: %s moved",
                self.name,
                describe(self._layout.infos[i] for i in moved),
            )
        return Room.FREE

    def _moved_parameters(
        self, shape: _Shape, static_key: StaticKey, args: Sequence[Any]
    ) -> list[int]:
        """Parameters and buffers whose address differs from the recording they come closest to."""
        del args
        if static_key in shape.sets:
            return []
        newest = next(reversed(shape.sets))
        pooled = set(self._layout.pooled)
        return [i for i in self._layout.moved(newest, static_key) if i not in pooled]

    def _is_same_object(self, index: int, value: torch.Tensor) -> bool:
        seen = self._seen.get(index)
        return seen is not None and seen() is value

    def _full(self, option: str, limit: int, moved: Sequence[int] = ()) -> Room:
        if not self._warned_limit:
            self._warned_limit = True
            infos = [self._layout.infos[i] for i in moved]
            cause = f" Moved: {describe(infos)}." if infos else ""
            log.warning(
                "%s has as many recordings as %s=%d allows; calls with other shapes or addresses run without a "
                "graph, known ones keep replaying.%s Raise the option, or keep addresses and shapes fixed.",
                self.name,
                option,
                limit,
                cause,
            )
        return Room.FULL

    def _is_idle(self, recordings: Iterable[Recording], limit: int) -> bool:
        newest = max((r.last_used for r in recordings), default=0)
        return self.stats.calls - newest > _IDLE_FACTOR * limit

    def _drop_idle_shape(self) -> bool:
        for key, shape in self._shapes.items():
            recordings = [r for rs in shape.sets.values() for r in rs]
            if self._is_idle(recordings, self._limits.max_recordings):
                del self._shapes[key]
                self._forget(recordings)
                return True
        return False

    def _drop_idle_set(self, shape: _Shape) -> bool:
        for key, recordings in shape.sets.items():
            if self._is_idle(recordings, self._limits.max_static_sets):
                del shape.sets[key]
                self._forget(recordings)
                return True
        return False

    def _forget(self, recordings: Iterable[Recording]) -> None:
        self._last = None
        for recording in recordings:
            for tensor in recording.own_outputs:
                self._owner.add_pool_storage(tensor.untyped_storage().data_ptr(), -1)
            recording.close()

    @property
    def num_recordings(self) -> int:
        """Recordings kept at the moment."""
        return sum(len(rs) for s in self._shapes.values() for rs in s.sets.values())

    def close(self) -> None:
        """Drop every recording. The next calls warm up again unless the owner is closed."""
        recordings = [r for s in self._shapes.values() for rs in s.sets.values() for r in rs]
        self._shapes.clear()
        self._placeholders.clear()
        self._forget(recordings)

