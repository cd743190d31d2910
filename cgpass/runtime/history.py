"""`History`: why each recording of a partition was made."""

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cgpass import tracing
from cgpass.runtime.recording import Recording
from cgpass.runtime.rule import Found
from cgpass.runtime.signature import Layout, ShapeKey, describe
from cgpass.runtime.table import Seen
from cgpass.runtime.warmup import WarmUp
from cgpass.summaries import RECORDINGS_KEPT, RecordingNote
from cgpass.tracing import NOWHERE, Source

log = logging.getLogger(__name__)

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

    def cause(self, layout: Layout, seen: Seen, found: Found, args: Sequence[Any]) -> Cause:
        """Why a call is recorded; to be called before it is."""
        return Cause(*self._compare(layout, seen, found, args), started=time.perf_counter())

    def add(
        self,
        cause: Cause,
        layout: Layout,
        seen: Seen,
        found: Found,
        args: Sequence[Any],
        recording: Recording,
    ) -> None:
        """Note a recording, just made."""
        note = RecordingNote(
            cause.code,
            cause.detail,
            recording.copied_bytes,
            recording.slot,
            (time.perf_counter() - cause.started) * 1e3,
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
        others = [
            i
            for i, a, b in zip(
                layout.parameters, self._tensors, _tensors(layout, args), strict=False
            )
            if a != b
        ]
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
    info = layout.infos[i]
    dtype = str(value.dtype).removeprefix("torch.")
    line = "" if info.line is None else f", read at {info.line}"
    where = (
        f"moved from {before:#x} to {now:#x}" if now and before else "lies at new places: copied"
    )
    return f"{info.name} ({dtype}{list(value.size())}{line}) {where}"


def _names(layout: Layout, positions: Sequence[int]) -> str:
    return describe((layout.infos[i] for i in positions), _NAMED)


def _tensors(layout: Layout, args: Sequence[Any]) -> tuple[int, ...]:
    """Which tensors a call's static inputs are."""
    return tuple(id(args[i]) for i in layout.parameters)
