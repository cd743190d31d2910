"""`PartitionRunner`: decides whether a call of one captured partition records, replays, or runs without a graph.

Note [What a call does]
    The key of a call is what it computes (sizes, integers, modes), the addresses of what it reads in place, and which
    inputs are copied; see Note [One rule for inputs]. A call is the first of these rows that fits:

    1   it is inside somebody else's capture or a transform, its owner is closed, there is no native code, or this
        partition or key is left plain: it runs without a graph
    2   it has recordings, one of which overwrites nothing that is referenced: replay. If it is the second call in a new
        place, these are the ones that the first was copied for
    3   it has recordings, all of which overwrite results of calls whose backward is due (`OutputMemory.can_rescue`):
        record another one, and replay it
    3b  the same, with `max_pending_calls` of them: without a graph
    4   it has recordings, which overwrite what is referenced otherwise: rescue that, look once more, replay
    5   it has none, but its key was seen, if with values of other recordings elsewhere, and there is room: record, and
        replay that
    6   else it is a warm-up: it runs without a graph, and its key was seen from now on (a plain call, of which nothing is
        remembered, if there is no room for it). What reads its results in this very call runs without a graph, too

    Nothing else decides. A recording goes when a storage that it reads in place is gone, or the recording whose values it
    reads, once something else is recorded. All go, and are made again in their next calls, before a larger one is made
    that finds no room in their memory (`Owner.make_space`), and when a second thread calls; a backward's do once, when its
    gradients turn out to be kept while a forward runs (`move_apart`). A partition that failed keeps its recordings.
"""

import logging
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Final, NoReturn

import torch

from cgpass import telemetry, torch_private
from cgpass.compile.facts.input_info import InputInfo
from cgpass.compile.facts.lines import raised_at
from cgpass.errors import CaptureError, StaticInputMovedError
from cgpass.options import Options
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.driver import BoxedCallable, is_capture_error
from cgpass.runtime.failures import OnFailure, give_memory_back
from cgpass.runtime.inputs import (
    Found,
    Inputs,
    Layout,
    ShapeKey,
    describe,
    listed,
    shared_with_written,
)
from cgpass.runtime.outputs import Uses
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recorder, Recording
from cgpass.runtime.rng import distances, forward_states, note_replayed, put_on_the_device
from cgpass.runtime.table import LAID_OUT_ANEW, RecordingTable, Seen
from cgpass.runtime.writes import Changes
from cgpass.telemetry import ByHand, CallStats, progress
from cgpass.telemetry.reason import OTHER_FIXES, CallReasons, many
from cgpass.telemetry.summaries import RecordingNote, Source

log = logging.getLogger(__name__)

_NAMED: Final = 3
"""Inputs that a text names."""
_NOTES: Final = 64
"""Recordings of which it is kept why they were made."""
_MOVES: Final = 3
"""Calls in turn with an input at a new place that can't be copied, until a warning says so: a parameter may be replaced
once or twice, and one that goes on moving moves in each."""
_CANNOT_BE_COPIED = {
    "in_place": "can't be copied, since an optimizer writes them",
    "too_large": "are too large to be copied (max_copied_mib={})",
    "whole_storage": "can't be copied, since the graph reads more of their storage than the tensors cover",
    "shares_memory": "can't be copied, since the graph writes an input that shares memory with another",
}
"""Codes of `Found` whose inputs would be copied otherwise, and why they are not."""

_BYPASSED = {
    "transform": "they were made inside a transform",
    "no_native_code": "recording needs the native code, which is missing",
}
"""Reasons for running any call without a graph, by code."""
_LEAVE_IN_PLACE = (
    "keep saved tensors in place (hooks and offloading move them), or raise max_copied_mib"
)
_NAME_IT = 'name the operator in options={"unsafe_ops": (...)} to capture the rest'
_NO_SYNCS = "Move the code that waits for the device or reads data on the host out of the function to capture the rest"
_HELD = "results of earlier calls are still referenced, or wait for their backward"

Plain = tuple[Sequence[Any], None]
"""Outputs of a call that ran without a graph."""


@dataclass(eq=False, repr=False)
class PartitionRunner:
    """Runs one captured partition. See Note [What a call does]."""

    fn: BoxedCallable
    infos: InitVar[Sequence[InputInfo]]
    owner: Owner
    options: Options
    _: KW_ONLY
    name: str
    """For messages; with the place of `source`, once it is made."""
    on_failure: OnFailure | None = None
    source: Source = field(default_factory=Source)
    opaque: bool = False
    """True if kernels of `fn` bypass aten."""
    is_backward: bool = False
    """True if outputs are gradients, which may be kept while other partitions run."""
    communicates: bool = False
    """True if `fn` communicates with other processes, which take no part in runs that this one makes alone."""
    check_layout: bool = False
    """True if tensors' sizes, strides and dtypes belong to the key, since no guard covers them."""
    by_hand: bool = False
    """True if no compiled graph has it."""

    uses: Uses | None = field(default=None, init=False)
    """Readers of its outputs, None if the user gets all; to be set before the first call."""
    returned_at: str | None = field(default=None, init=False)
    """The user's line that makes all outputs that he gets, if it is one, for reports."""

    def __post_init__(self, infos: Sequence[InputInfo]) -> None:
        self._traced_as, self.name = self.name, self.source.of(self.name)
        options, owner = self.options, self.owner
        self._refuses = options.on_skip == "raise"
        self.reasons = CallReasons()
        """Reasons for calls without a graph."""
        self.stats = CallStats()
        if self.by_hand:
            self.stats = ByHand(name=self.name, driver=options.driver, reasons=self.reasons)
        telemetry.registry.counts.append(self.stats)
        self.notes: deque[RecordingNote] = deque(maxlen=_NOTES)
        """Notes of the newest recordings."""
        self.layout = layout = Layout(
            infos,
            check_static=options.static_input_check != "off",
            check_layout=self.check_layout,
        )
        self.table = RecordingTable(options.max_recordings)
        self._inputs = Inputs(layout, owner, options.max_recordings, options.max_copied_mib << 20)
        self._recorder = Recorder(
            self.fn,
            layout,
            owner,
            opaque=self.opaque,
            finds_writes=self.check_layout,
            stats=self.stats,
        )
        self._last: tuple[ShapeKey, bytes, list[Recording]] | None = None
        """Key and recordings of the last replay of what lay in place."""
        self._latest: Recording | None = None
        self._copied: dict[int, int] = {}
        """See `copied_inputs`, if that recording is gone."""
        self._here = threading.local()
        """True if this thread ran a call without a graph: libraries keep handles for each thread."""
        self._started = 0.0
        """Begin of the last capture."""
        self._start_anew()
        owner.add(self.close, self.forget_recordings)

    def _start_anew(self) -> None:
        """Know of no failures, and of nothing that was said or recorded."""
        self.failure: str | None = None
        """The failure after which the partition is captured no more."""
        self._refusal: str | None = None
        """Message that calls raise which would record, if `on_skip` is "raise"."""
        self._first_pool = self._largest = self._unseen = 0
        """Pools before this one do not suit (see `move_apart`); bytes that move of the largest call recorded; calls
        since the last recording whose key was new, for a warning."""
        self._tried_anew = False
        self._said: set[str] = set()

    @property
    def copied_inputs(self) -> dict[int, int]:
        """Bytes that the last replay copied, by position of the input, for reports."""
        return self._copied if self._latest is None else self._latest.copied_inputs

    def run(self, args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
        """Run one call, which empties the list of its inputs; returns its outputs, and the recording that made them.

        **Lifetime:** outputs of a recording lie in the pool. They stay valid as long as somebody holds them, since no
        recording is replayed over held memory; placeholders and temporaries do not.
        """
        self.stats.calls += 1
        layout = self.layout
        if layout.seeds:
            put_on_the_device(args, layout.seeds, self.owner.driver.device)
        states, start = forward_states(args, layout.objects) if layout.objects else ((), None)
        made = self._row(args) or self._row(args) or self._row(args)
        if made is None:  # each time it was rescued from where it lay
            made = self._plain(args, "not_in_the_pool", "values that they read were copied out")
        if not isinstance(made, Recording):
            return made
        self.owner.note_handed_out(made)  # before it can be held, whatever happens
        outputs = made.run(args)
        self._latest = made
        args.clear()
        self.stats.replays += 1
        self.stats.copied_bytes += made.copied_bytes
        if states:
            note_replayed(states, start, made.draws)
        return outputs, made

    def _row(self, args: list[Any]) -> Recording | Plain | None:
        """Rows 1, 2 and 4 for calls whose addresses are those of a recording; None if what is read was moved."""
        owner, layout, last = self.owner, self.layout, self._last
        if owner.bypassed is not None:
            why = _BYPASSED.get(owner.bypassed, "")
            if owner.bypassed == "transform":
                self._say_once("transform", why)
            return self._run_plainly(args, owner.bypassed if why else None, why)
        if self.check_layout and (shared := shared_with_written(args, layout.mutated)):
            tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
            alike = [i for i in tensors if args[i].untyped_storage().data_ptr() in shared]
            why = f"it writes inputs, and these share memory: {describe(layout.infos, alike)}"
            self._say_once("shares_memory", why)
            return self._run_plainly(args, "shares_memory", why)
        shape, key = layout.shape_key(args), layout.static_key(args)
        if last is None or last[0] != shape or last[1] != key:
            last = (shape, key, self.table.recordings(shape, *layout.split(key)))
        if last[2] and not owner.driver.is_capturing():
            self._last = last
            recording = self._choose(last[2], args, key)
            if recording is not None or layout.static_key(args) != key:
                return recording
        return self._without_recording(args, shape, key)

    def _choose(
        self, recordings: Sequence[Recording], args: list[Any], key: bytes
    ) -> Recording | None:
        """One that overwrites nothing that is referenced, if need be after that was rescued; None if there is none."""
        owner = self.owner
        for recording in recordings:
            if owner.is_safe(recording) and recording.may_replay(args):
                return recording
        for recording in recordings:
            if recording.may_replay(args) and owner.rescue(recording):
                stayed = self.layout.static_key(args) == key  # nothing that is read was moved
                return recording if stayed and recording.may_replay(args) else None
        return None

    # ---- other calls

    def _without_recording(
        self, args: list[Any], shape: ShapeKey, key: bytes
    ) -> Recording | Plain | None:
        """The other rows, and row 1, 2 and 4 for calls that copy what is read in place elsewhere."""
        owner = self.owner
        if self._refusal is not None:
            raise CaptureError(self._refusal)
        if owner.driver.is_capturing():
            return self._plain(args, "outer_capture", "they ran inside a capture of your own")
        if owner.closed or self.failure is not None:
            return self._run_plainly(args, self.failure and "capture", self.failure or "")
        found = self._inputs.find(args, key)
        seen = self.table.get(shape, found.places)
        if self.options.static_input_check == "error":
            self._refuse_moved(found, args)
        if seen is None or (seen.is_gone and not seen.recordings):
            seen, found = self._copied_once_more(args, shape, found, key, seen)
        if seen is None or found.code is not None:
            return self._unrecorded(args, shape, found, key, seen)
        self._inputs.remember(args, found.new)
        if seen.left_plain is not None:
            return self._plain(args, *seen.left_plain)
        if found.copied:
            recording = self._choose(seen.recordings.get(found.values, ()), args, key)
            if recording is not None or self.layout.static_key(args) != key:
                return recording
        return self._record_or_not(args, seen, found, key)

    def _copied_once_more(
        self, args: Sequence[Any], shape: ShapeKey, found: Found, key: bytes, seen: Seen | None
    ) -> tuple[Seen | None, Found]:
        """Row 2 for the second call in new places, whose first was copied; the next one records it there."""
        places, _ = self.layout.split(key)
        other = None if found.code else self.table.copying(shape, places)
        if other is None:
            return seen, found
        each = zip(self.layout.checked, array("q", other.key[1]), array("q", places), strict=True)
        again = self._inputs.find(args, key, tuple(i for i, at, here in each if at != here))
        if again.code is not None:
            return seen, found
        objects = tuple(args[i] for i in self.layout.objects)
        storages = self._inputs.storages(args, places)
        moved = describe(self.layout.infos, again.new, args, _NAMED)
        cause = "moved", f"moved: {moved}", self._named(again.new)[1]
        self.table.remember(Seen((shape, places), storages, other.draws, objects, cause))
        return other, again

    def _record_or_not(
        self, args: list[Any], seen: Seen, found: Found, key: bytes
    ) -> Recording | Plain | None:
        """Rows 3, 3b and 5."""
        owner, table = self.owner, self.table
        seen.storages = self._inputs.storages(args, found.places)
        table.remember(seen)  # or it could be forgotten as the oldest, with what is recorded now
        if seen.recordings:
            names = describe(self.layout.infos, self.layout.pooled, limit=_NAMED)
            why = f"values of other partitions moved, or were recorded again: {names}"
            seen.cause = "memory", why, self._named(self.layout.pooled)[1]
        self._close(table.drop_gone())
        if not table.has_room(seen.made_for):
            return self._full(args, seen.key[0], held=bool(seen.recordings.get(found.values)))
        size = sum(args[i].nbytes for i in (*self.layout.copied, *self.layout.pooled))
        if 0 < self._largest < size:
            owner.make_space()
        self._largest = max(self._largest, size)
        pool_index = self._pool_for(seen, found)
        if pool_index is None:
            limit = owner.max_pending_calls
            why = f"results of {many(limit, 'earlier call')} were still referenced, as many as max_pending_calls={limit} allows"
            made = f" (made at {self.returned_at})" if self.returned_at else ""
            self._say_once("max_pending_calls", f"{why}{made}")
            return self._plain(args, "max_pending_calls", why, self.returned_at)
        if self.layout.static_key(args) != key:
            return None
        return self._record_call(args, seen, found, key, pool_index)

    def _run_plainly(
        self, args: list[Any], code: str | None = None, why: str = "", line: str | None = None
    ) -> Plain:
        """Run the callable itself, as this partition always will or since no reader can tell."""
        outputs = self.fn(args)
        self.stats.plain_calls += 1
        if code is not None:
            self.reasons.note(code, why, line)
        return outputs, None

    def _plain(self, args: list[Any], code: str, why: str, line: str | None = None) -> Plain:
        """Run this call without a graph, and have what reads its results do so, too; nothing is remembered."""
        made = self._run_plainly(args, code, why, line)
        self.owner.note_plain_results(made[0])
        return made

    def _unrecorded(
        self, args: list[Any], shape: ShapeKey, found: Found, key: bytes, seen: Seen | None
    ) -> Plain:
        """Row 6: run without a graph. Two keys were seen from now on: the call's, and that of a next one at these places."""
        table, inputs = self.table, self._inputs
        if found.code == "not_in_the_pool":
            if not self.owner.made_in_warm_ups(args[i] for i in found.absent):
                name, line = self._named(found.absent)
                why = f"the partition that makes {name} ran without a graph"
                return self._plain(args, found.code, why, line)
            if seen and seen.recordings and not seen.is_gone:
                return self._warm_up(args), None
        storages = inputs.storages(args, found.places)
        if seen is None and not table.has_room(tuple(storages)):
            return self._full(args, shape)
        cause, why = self._what_is_new(args, shape, found)
        inputs.remember(args, found.new)
        keys = {(shape, found.places): storages}
        places, _ = self.layout.split(key)  # some may be copied: as it will be in these places
        keys.setdefault((shape, places), inputs.storages(args, places))
        objects = tuple(args[i] for i in self.layout.objects)
        states, start = forward_states(objects, range(len(objects)))
        outputs = self._warm_up(args, why)
        draws = distances(states, start)
        for each in reversed(keys.items()):
            table.remember(Seen(*each, draws, objects, cause))
        return outputs, None

    def _warm_up(self, args: list[Any], why: str | None = None) -> Sequence[Any]:
        """Run one call without a graph, which is no mere warm-up if `why` says so. To look for writes may wait."""
        stats = self.stats
        changes = Changes(args, self.layout.copied if self.check_layout else ())
        self._here.ran = True
        with torch_private.autocast_cache_off():
            outputs = self.owner.warm_up(self.fn, args)
        self.layout.mutated |= changes.found()
        stats.warmups += why is None
        stats.plain_calls += why is not None
        self.owner.note_plain_results(outputs, is_warm_up=why is None)
        return outputs

    # ---- what is said of it

    def _say_once(self, code: str, why: str, fix: str | None = None) -> None:
        """Say why calls run without a graph, and what to do about it, until failures are forgotten once."""
        if code not in self._said:
            self._said.add(code)
            text = f"{self.name}: calls like this one run without a graph: {why}"
            self._say(_advising(text, fix or OTHER_FIXES[code]))

    def _say(self, text: str) -> None:
        log.log(logging.WARNING if self.options.on_skip == "warn" else logging.INFO, "%s", text)

    def _refuse_moved(self, found: Found, args: Sequence[Any]) -> None:
        """Raise for static inputs at new places, unless a compiled function's are another module's."""
        is_other = found.code == "new_module" and not self.check_layout
        if found.new and self.stats.recordings and not is_other:
            names = describe(self.layout.infos, found.new, args)
            raise StaticInputMovedError(
                f"{self.name}: static inputs moved or were replaced since they were recorded: {names}. Write new values "
                "into parameters and buffers (copy_, load_state_dict without assign=True), or use "
                'static_input_check="rerecord".'
            )

    def _what_is_new(
        self, args: Sequence[Any], shape: ShapeKey, found: Found
    ) -> tuple[tuple[str, str, str | None], str | None]:
        """Return the cause of a call's new key, and why it is no warm-up if such calls keep coming."""
        layout, infos = self.layout, self.layout.infos
        new, code = found.new or found.absent, "new_tensor"
        others: Sequence[int] = new
        last, any_shape = self.table.newest(shape), self.table.newest()
        if any_shape is None:
            cause = "first", "the first call after the warm-up"
            if self.stats.recordings:
                cause = (
                    "anew",
                    "recordings were freed: by cgpass.reset(), explain or a failed capture",
                )
        elif last is None:
            code, new = "new_shape", layout.changed(any_shape[0], shape)
            others = new
            what = describe(infos, new, limit=_NAMED) or "modes of torch"
            cause = "shape", f"the first call with this value or layout of {what}"
        else:
            places = zip(layout.checked, array("q", last[1]), array("q", found.places), strict=True)
            others = found.new or [i for i, before, now in places if before != now]
            moved = found.new or any(self._inputs.was_moved(i, args[i]) for i in others)
            new = new or others
            if moved and found.code != "new_module":
                cause = "moved", f"moved: {describe(infos, others, args, _NAMED)}"
            else:
                what = describe(infos, others, limit=_NAMED)
                cause = "other tensors", f"the first call with other tensors for {what}"
        if code == "new_tensor" and found.code == "not_in_the_pool" and not found.new:
            code = found.code
        if any_shape is not None and code != "not_in_the_pool":
            self.reasons.note_changed(code, [(infos[i].name, infos[i].line) for i in new])
        self._unseen += 1
        told = cause[0], cause[1], self._named(others)[1]
        return told, self._why_never_recorded(args, found, code, new)

    def _why_never_recorded(
        self, args: Sequence[Any], found: Found, code: str, new: Sequence[int]
    ) -> str | None:
        """Say once that calls go on whose key is new; returns why, unless they differ by sizes, which may come back."""
        why_not = _CANNOT_BE_COPIED.get(found.code or "", "").format(self.options.max_copied_mib)
        if self._unseen < (_MOVES if why_not else 2 * self.options.max_recordings):
            return None
        if code == "not_in_the_pool":  # its maker said why
            name, line = self._named(found.absent)
            text = f"the partition that makes {name} ran without a graph"
            self.reasons.note(code, text, line)
            return text
        others = () if code == "new_shape" else new
        names = describe(self.layout.infos, found.new or found.absent or others, args)
        cause, fix = f"each had other tensors: {names}", OTHER_FIXES[code]
        if why_not:
            cause = f"each had {names} at a new address, and they {why_not}"
            code = "new_tensor" if found.new else code
            fix = OTHER_FIXES["new_tensor"] if found.new else _LEAVE_IN_PLACE
        elif code == "new_shape":
            cause = f"each had a new value or layout of {describe(self.layout.infos, new)}"
        text = f"{self._unseen} calls were never recorded, since {cause}"
        self._say_once("unseen", text, fix)
        if code == "new_shape" and not why_not:
            return None
        line = self._named(new)[1]
        self.reasons.note(code, text, line)
        return text

    def _full(self, args: list[Any], shape: ShapeKey, *, held: bool = False) -> Plain:
        limit = self.options.max_recordings
        recorded = [seen.key[0] for seen in self.table.seen() if seen.recordings]
        changed = self.layout.changed(recorded[-1], shape) if recorded else ()
        name, line = self._named(changed) if changed else ("values of other partitions", None)
        why = f"max_recordings={limit} shapes are recorded, and {name} had a new value or layout"
        if held:
            why, line = f"max_recordings={limit} recordings are made, and {_HELD}", None
        self._say_once("max_recordings", why)
        return self._plain(args, "max_recordings", why, line)

    def _named(self, positions: Sequence[int]) -> tuple[str, str | None]:
        """Names of inputs, at most three of them, and the first of the user's lines that read them."""
        infos = [self.layout.infos[i] for i in positions]
        line = next((info.line for info in infos if info.line is not None), None)
        return listed([info.name for info in infos], _NAMED), line

    # ---- recordings

    def _record_call(
        self, args: list[Any], seen: Seen, found: Found, key: bytes, pool_index: int
    ) -> Recording | Plain | None:
        """Record a call, which is to be replayed then; where that fails, run it without a graph."""
        self._unseen = 0
        with self.owner.changing():
            recording = self._attempt(args, found, pool_index)
            if isinstance(recording, torch.OutOfMemoryError):
                give_memory_back(recording, self.owner.driver)
                again = self._pool_for(seen, found)  # not where inputs lie that died in the capture
                if again is not None:
                    recording = self._attempt(args, found, again)
            if isinstance(recording, Recording):
                self._add(recording, args, seen, found, key)
        if not isinstance(recording, Exception):
            return recording
        error, recording = recording, None
        try:
            return self._run_without(args, seen, error)
        finally:
            del error  # its traceback holds this frame, and with it this call's inputs

    def _pool_for(self, seen: Seen, found: Found) -> int | None:
        """See `Owner.pool_for`."""
        beside = [r for r in seen.recordings.get(found.values, ()) if r.made_for == seen.made_for]
        return self.owner.pool_for(len(beside), first=self._first_pool)

    def _attempt(
        self, args: list[Any], found: Found, pool_index: int
    ) -> Recording | Exception | None:
        """A recording, what it failed with, or None if that writes what shares memory: another row is this call's."""
        self._started = time.perf_counter()
        try:
            # Memory of recordings is written in whatever mode later calls come: no inference tensors.
            told = progress.shown(f"recording {self.name}", self.options.progress)
            with told, torch.inference_mode(False), torch.no_grad():
                if not self._ran_here:
                    self.owner.driver.prepare_thread()
                recording = self._recorder.record(args, pool_index, self.uses, copied=found.copied)
        except Exception as error:
            mend(open_modes)
            return error
        self.layout.mutated |= recording.written
        if self.check_layout and shared_with_written(args, self.layout.mutated):
            recording.close(whole_pool=False)
            return None
        return recording

    @property
    def _ran_here(self) -> bool:
        return getattr(self._here, "ran", False)

    def _add(
        self, recording: Recording, args: Sequence[Any], seen: Seen, found: Found, key: bytes
    ) -> None:
        """Keep a recording, and say why it was made."""
        cause, others = seen.cause, seen.recordings
        beside = others.get(found.values, ())
        if cause[0] == "first" and self.stats.recordings:  # other sizes were recorded before it
            cause = "shape", "the first call with this value or layout that was seen before", None
        if not all(self._has_younger_inputs(each, args) for each in beside):
            cause = "held", _HELD, None
        took = (time.perf_counter() - self._started) * 1e3
        note = RecordingNote(*cause[:2], recording.copied_bytes, took, cause[2] or self.returned_at)
        self.notes.append(note)
        self.stats.recordings += 1
        self.stats.rerecordings += note.cause == "moved"
        if isinstance(self.stats, ByHand) and note.cause != "first":
            fix = f"; {OTHER_FIXES['new_tensor']}" * (note.cause == "moved")
            self.stats.why[f"recorded: {note.detail}{fix}"] += 1
        log.info("%s: recording %d made: %s", self.name, self.stats.recordings, note.detail)
        number, partition = self.stats.recordings, self._traced_as
        told = {"partition": partition, "function": self.source.place, "recording": number}
        traced_as = f"{partition.replace(' ', '_')}_recording_{number}"
        torch_private.trace(traced_as, lambda: told | vars(note), self.source.trace_id)
        recording.made_for, recording.draws = seen.made_for, seen.draws
        self.owner.note_modules()
        read = [args[i] for i in self.layout.pooled if i not in found.copied]
        recording.makers = [weakref.ref(maker) for maker in self.owner.makers(read)]
        if self.is_backward and not self._first_pool:
            recording.backward = self
        self.owner.add_recording(recording)
        others.setdefault(found.values, []).append(recording)
        if not found.copied:
            self._last = (seen.key[0], key, others[found.values])

    def _has_younger_inputs(self, recording: Recording, args: Sequence[Any]) -> bool:
        """Tell whether values that it reads come from recordings that were made after it, whose order it can't keep."""
        read = {args[i].untyped_storage()._cdata for i in self.layout.pooled}
        return any(
            maker.capture_index > recording.capture_index
            and any(maker.memory.watch[0][n]._cdata in read for n in blocks)
            for maker, blocks in self.owner.overwritten_by(recording)
        )

    def _close(self, recordings: Sequence[Recording]) -> None:
        self._copied = self.copied_inputs
        self._last = self._latest = None
        with self.owner.changing():
            for recording in recordings:
                self.owner.close_recording(recording)

    def move_apart(self, by: Recording) -> None:
        """Record from now on in pools after a forward's, so that it does not overwrite gradients that are kept."""
        self._first_pool = by.pool_index + 1
        self.forget_recordings()

    def forget_recordings(self) -> None:
        """Drop every recording; calls of keys seen so far record at once."""
        self._largest = 0
        self._close(self.table.drop(lambda seen, recording: True, LAID_OUT_ANEW))

    def close(self) -> None:
        """Drop every recording; the next calls warm up again, and what failed is tried again, unless the owner is closed."""
        self._close(self.table.clear())
        self._inputs.forget()
        if self.owner.closed:
            return
        if self.on_failure is not None and (self.failure or self._refusal):
            self.on_failure.forget()
        self._start_anew()

    # ---- captures that fail

    def _run_without(self, args: list[Any], seen: Seen, error: Exception) -> Plain:
        """Make a call that could not be recorded."""
        if isinstance(error, torch.OutOfMemoryError):
            give_memory_back(error, self.owner.driver)
            code, why = "out_of_memory", _text_of(error)
            if self._refuses:
                self._refuse(error, OTHER_FIXES[code])
            self._say_once(code, why)
            seen.left_plain = code, why
            return self._plain(args, code, why)
        nobody_asks = self.on_failure is None and not is_capture_error(error)
        if (nobody_asks or not self._ran_here) and not self._tried_anew:
            self._tried_anew = True  # it may succeed later, or once this thread ran a call
            return self._warm_up(args), None
        return self._run_failed(args, error)

    def _run_failed(self, args: list[Any], error: Exception) -> Plain:
        """Make a call whose capture failed without it, and no other: an error that comes again is the user's own."""
        why, is_compiled_again, advice = _text_of(error), False, _NO_SYNCS
        if self.on_failure is not None:
            advice = _NAME_IT
            try:
                why, is_compiled_again = self.on_failure(list(args), error)
            except CaptureError as refusal:
                if self._refuses:
                    self._refusal = str(refusal)
                raise
        elif (line := raised_at(error)) is not None:
            why += f" (at {line})"
        if self._refuses and is_capture_error(error):
            self._refuse(error, advice)
        try:
            outputs = self._run_plainly(args, "capture", why)
        except BaseException:
            if self.on_failure is not None:
                self.on_failure.forget()
            raise
        self.failure, text = why, self._message(why, advice)
        if is_compiled_again:
            text = (
                f"{self.name} can't be captured as a whole; the next call compiles the function again, to capture all but "
                f"this: {why}"
            )
        if self._refuses:
            self._refusal = text
        self._say(text)
        return outputs

    def _refuse(self, error: Exception, advice: str) -> NoReturn:
        self._refusal = self._message(_text_of(error), advice)
        raise CaptureError(self._refusal) from error

    def _message(self, why: str, advice: str) -> str:
        then = "runs without a graph from now on"
        then = 'on_skip="raise" refuses its calls' if self._refuses else then
        return _advising(f"{self.name} can't be captured and {then}: {why}", advice)


def _advising(text: str, fix: str) -> str:
    return f"{text.rstrip('.')}. {fix[0].upper()}{fix[1:]}."


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
