"""`History`: why each recording of a partition was made."""

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cgpass import tracing
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import Layout, ShapeKey, StaticKey, describe
from cgpass.runtime.warmup import WarmUp
from cgpass.summaries import RECORDINGS_KEPT, RecordingNote
from cgpass.tracing import NOWHERE, Source

log = logging.getLogger(__name__)

_SETS_KEPT: Final = 256
"""Sets of parameters of which it is known where they lay."""
_NAMED: Final = 3
"""Inputs that a cause names."""


@dataclass(frozen=True)
class Cause:
    """Why a recording is about to be made."""

    code: str
    detail: str
    started: float
    """By `time.perf_counter`."""


class History:
    """Compares what is recorded with what was recorded before, and keeps the newest causes."""

    def __init__(self, name: str, warm_ups: WarmUp, source: Source = NOWHERE) -> None:
        """Args: name: of the partition, for messages. warm_ups: its. source: where it is from."""
        self._name = name
        self._warm_ups = warm_ups
        self._source = source
        self._causes: Counter[str] = Counter()
        self.notes: deque[RecordingNote] = deque(maxlen=RECORDINGS_KEPT)
        self._shapes: dict[ShapeKey, dict[int, StaticKey]] = {}
        """Where each set of parameters lay, by the identities of its tensors, per shape."""
        self._num_sets = 0
        self._ids: tuple[int, ...] = ()
        """Which tensors the parameters of the call recorded last were."""
        self._why_anew: str | None = None

    def forget(self, why: str) -> None:
        """Note that every recording goes.

        Args:
            why: They are made once more.
        """
        if self.notes:
            self._why_anew = why
        self._shapes.clear()
        self._num_sets = 0

    def cause(
        self,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
        found: Sequence[Recording],
    ) -> Cause:
        """Why a call is recorded; to be called before it is.

        Args:
            layout: Of the inputs.
            keys: The call's signature.
            args: The call's inputs.
            found: Recordings of this very signature.
        """
        return Cause(*self._compare(layout, keys, args, found), started=time.perf_counter())

    def add(
        self,
        cause: Cause,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
        recording: Recording,
    ) -> None:
        """Note a recording, just made."""
        record_ms = (time.perf_counter() - cause.started) * 1e3
        detail = cause.detail
        if recording.stationary:
            names = _names(layout, recording.stationary)
            detail += f"; it reads in place what had not moved until then: {names}"
        note = RecordingNote(
            cause.code,
            detail,
            recording.copied_bytes,
            recording.slot,
            record_ms,
            recording.instantiate_ms,
            self._warm_ups.last_ms,
        )
        self.notes.append(note)
        recording.label, recording.note = self._source.of(self._name), note
        self._announce(note)
        self._warm_ups.last_ms = None
        if self._num_sets >= _SETS_KEPT:
            self._shapes.clear()
            self._num_sets = 0
        sets = self._shapes.pop(keys[0], {})
        self._shapes[keys[0]] = sets  # the newest comes last
        identity = _identity(layout, args)
        self._num_sets += identity not in sets
        sets[identity] = keys[1]
        self._why_anew = None
        self._ids = _ids(layout, args)

    def _announce(self, note: RecordingNote) -> None:
        self._causes[note.cause] += 1
        number, times = self._causes.total(), self._causes[note.cause]
        often = f" (for moved inputs: {times} so far)" if note.cause == "moved" else ""
        name = self._source.of(self._name)
        log.info("%s: recording %d made%s: %s", name, number, often, note.detail)
        tracing.add_recording(self._name, number, note, self._source)

    def _compare(
        self,
        layout: Layout,
        keys: tuple[ShapeKey, StaticKey],
        args: Sequence[Any],
        found: Sequence[Recording],
    ) -> tuple[str, str]:
        shape_key, static_key = keys
        if found:
            return "held", (
                "results of earlier calls are still referenced, or wait for their backward: one more recording beside theirs"
            )
        if self._why_anew is not None:
            return "anew", self._why_anew
        sets = self._shapes.get(shape_key)
        if sets is None:
            return self._new_shape(layout, shape_key)
        before = sets.get(_identity(layout, args))
        if before is None:
            return "other tensors", self._others(layout, args)
        return _moves(layout, before, static_key, args)

    def _others(self, layout: Layout, args: Sequence[Any]) -> str:
        """Parameters and buffers that are other tensors than in the call recorded last."""
        now = _ids(layout, args)
        new = [i for i, a, b in zip(layout.parameters, self._ids, now, strict=False) if a != b]
        if not new or len(self._ids) != len(now) or len(new) == len(now) > _NAMED:
            return "the first call with these parameters and buffers"
        return f"the first call with {'this tensor' if len(new) == 1 else 'these tensors'} for {_names(layout, new)}"

    def _new_shape(self, layout: Layout, shape_key: ShapeKey) -> tuple[str, str]:
        if not self._shapes:
            return "first", "the first call after the warm-up"
        changed = layout.changed(next(reversed(self._shapes)), shape_key)
        names = _names(layout, changed) if changed else "modes of torch"
        return "shape", f"the first call with this value or layout of {names}"


def _moves(
    layout: Layout, before: StaticKey, now: StaticKey, args: Sequence[Any]
) -> tuple[str, str]:
    """What lies elsewhere than when the same tensors were recorded last."""
    moved = layout.parameters_moved(before, now)
    if moved:
        addresses = _addresses(layout, before), _addresses(layout, now)
        texts = [_move(layout, i, args[i], addresses) for i in moved[:_NAMED]]
        return "moved", ", ".join(texts) + _more(moved)
    elsewhere = layout.moved(before, now)
    if elsewhere:
        names = _names(layout, elsewhere)
        return "memory", f"values of other partitions lie elsewhere: {names}"
    return "anew", "memory of the recordings was copied to a new layout"


def _addresses(layout: Layout, key: StaticKey) -> Mapping[int, int]:
    return dict(zip(layout.static, array("q", key), strict=True))


def _move(
    layout: Layout, i: int, value: Any, addresses: tuple[Mapping[int, int], Mapping[int, int]]
) -> str:
    info = layout.infos[i]
    dtype = str(value.dtype).removeprefix("torch.")
    line = "" if info.line is None else f", read at {info.line}"
    before, now = (each[i] for each in addresses)
    return f"{info.name} ({dtype}{list(value.size())}{line}) moved from {before:#x} to {now:#x}"


def _names(layout: Layout, positions: Sequence[int]) -> str:
    return describe((layout.infos[i] for i in positions), _NAMED)


def _more(positions: Sequence[int]) -> str:
    left = len(positions) - _NAMED
    return f", and {left} more" if left > 0 else ""


def _identity(layout: Layout, args: Sequence[Any]) -> int:
    """Which tensors a call's parameters are."""
    return hash(_ids(layout, args))


def _ids(layout: Layout, args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(id(args[i]) for i in layout.parameters)
