"""`PartitionRunner`: runs one captured partition, by replaying a recording wherever there is one that may.

Note [What a call does]
    The key of a call is what it computes (sizes, integers, modes), the addresses of what it reads in place, and which
    inputs are copied; see Note [One rule for inputs]. A call is the first of these rows that fits:

    1   it is inside somebody else's capture or a transform, its owner is closed, there is no native code, or this
        partition or key is left plain: it runs without a graph
    2   it has recordings, one of which overwrites nothing that is referenced: replay
    3   it has recordings, all of which overwrite results of calls whose backward is due: record another one
    3b  the same, with `max_pending_calls` of them: without a graph
    4   it has recordings, which overwrite what is referenced otherwise: rescue that, look once more, replay
    5   it has none, but its key was seen, and there is room: record
    6   else it runs without a graph, and its key was seen from now on, unless there is no room for it or what it reads
        was made without a graph in this very call

    Nothing else decides. A recording goes when a storage that it reads in place is gone, once something else is
    recorded. All go, and are made again in their next calls, before a larger one is made, which finds no room in their
    memory (`Owner.make_space`), and when a second thread calls; a backward's do once, when its gradients turn out to be
    kept while a forward runs (`move_apart`). A partition that failed keeps the recordings that it has.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.errors import StagingError, StaticInputMovedError
from cgpass.options import Options
from cgpass.runtime import native
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.driver import BoxedCallable, is_capture_error
from cgpass.runtime.failures import Fallback, OnFailure, give_memory_back
from cgpass.runtime.inputs import (
    Found,
    Inputs,
    Layout,
    ShapeKey,
    describe,
    describe_tensors,
    shared_with_written,
)
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recorder, Recording
from cgpass.runtime.rng import forward_states, note_positions, put_on_the_device
from cgpass.runtime.table import History, RecordingTable, Seen
from cgpass.runtime.writes import Changes
from cgpass.telemetry import CallStats, new_call_stats, progress
from cgpass.telemetry.reason import CallReasons, is_size, many, new_value
from cgpass.telemetry.tracing import NOWHERE, Source

_CANNOT_BE_COPIED = {
    "in_place": "can't be copied, since an optimizer writes them",
    "too_large": "are too large to be copied (max_copied_mib={})",
    "whole_storage": "can't be copied, since more of their storages is read than they are",
    "shares_memory": "can't be copied, since an input that is written shares memory with another",
}
"""Codes of `Found` whose inputs would be copied otherwise, and why they are not."""

_WRITE_IN_PLACE = "Write new values into parameters and buffers (copy_, load_state_dict without assign=True) instead of replacing them."
_LEAVE_IN_PLACE = (
    "Leave saved tensors where they lie (hooks and offloading move them), or raise max_copied_mib."
)

Result = tuple[Sequence[Any], Recording | None]
"""A call's outputs, and the recording that made them (None if they were made without a graph)."""


class PartitionRunner:
    """Runs one captured partition. See Note [What a call does]."""

    _due: list[Seen] | None = None
    """Keys to be remembered once it is known how far their operators draw."""
    _started = 0.0
    """When the last attempt to record began."""
    _moved: tuple[int, int] = 0, 0
    """The last call that read at new places what can't be copied, and how many such calls it ended, one after another."""

    def __init__(
        self,
        fn: BoxedCallable,
        infos: Sequence[InputInfo],
        owner: Owner,
        options: Options,
        *,
        name: str,
        on_failure: OnFailure | None = None,
        source: Source = NOWHERE,
        opaque: bool = False,
        is_backward: bool = False,
        communicates: bool = False,
        check_layout: bool = False,
    ) -> None:
        self.name = source.of(name)
        self.fn = fn
        self.owner = owner
        self.options = options
        self.opaque = opaque
        """True if kernels of `fn` bypass aten."""
        self.is_backward = is_backward
        """True if outputs are gradients, which may be kept while other partitions run."""
        self.communicates = communicates
        """True if `fn` communicates with other processes, which take no part in runs that this one makes alone."""
        self._check_layout = check_layout
        """True if tensors' sizes, strides and dtypes belong to the key, since no guard covers them."""
        self.visible: frozenset[int] | None = None
        """Outputs that the user gets, None for all; to be set before the first call."""
        self.read: frozenset[int] = frozenset()
        """Outputs that other partitions or the backward read; to be set before the first call."""
        self.written: frozenset[int] = frozenset()
        """Inputs that plain calls and recordings turned out to write, where nobody told."""
        self._last: tuple[ShapeKey, bytes, list[Recording]] | None = None
        """Key and recordings of the last replay of what lay in place."""
        self._draws: list[int] = []
        """Of this call's key: see `Seen.draws`."""
        self._first_slot = self._largest = 0
        """Pools before this one do not suit (see `move_apart`); bytes that move of the largest call recorded."""
        self._unseen = 0
        """Calls since the last recording whose key was new, for a warning."""
        self._tried_anew = False
        self.stats: CallStats = new_call_stats()
        self.reasons = CallReasons()
        """Why calls ran without a graph."""
        self.layout = layout = Layout(
            infos, check_static=options.static_input_check != "off", check_layout=check_layout
        )
        self.table = RecordingTable(options.max_recordings)
        self.history = History(name, source)
        self._inputs = Inputs(layout, owner, options.max_recordings, options.max_copied_mib << 20)
        self._fallback = Fallback(
            self.name, fn, self.stats, self.reasons, on_skip=options.on_skip, on_failure=on_failure
        )
        self._recorder = Recorder(
            fn, layout, owner, opaque=opaque, finds_writes=check_layout, stats=self.stats
        )
        self._here = threading.local()
        """True if this thread ran a call without a graph: libraries keep handles for each thread."""
        owner.add(self)
        native.loader.wait(options.progress)

    @property
    def failure(self) -> str | None:
        """Why the partition is captured no more."""
        return self._fallback.failure

    @property
    def owns_outputs(self) -> bool:
        """True if users own what they get, so that whoever calls `run` copies it. See Note [Calls from several threads]."""
        return self.owner.several_threads or self.options.outputs == "owned"

    def run(self, args: list[Any]) -> Result:
        """Run one call, which empties the list of its inputs.

        **Lifetime:** outputs of a recording lie in the pool. They stay valid as long as somebody holds them, since no
        recording is replayed over held memory; placeholders and temporaries do not.
        """
        self.stats.calls += 1
        layout = self.layout
        if layout.seeds:
            put_on_the_device(args, layout.seeds, self.owner.driver.device)
        states = forward_states(args, layout.objects) if layout.objects else ()
        if not states:
            return self._run(args)
        start, self._draws, self._due = states[0].start(), [], []
        outputs, recording = self._run(args)
        note_positions(states, start, self._draws, replayed=recording is not None)
        for each in self._due:
            self.table.remember(each)
        return outputs, recording

    def _run(self, args: list[Any]) -> Result:
        """One call by the rows, anew where to make room for it moved what it reads."""
        for _ in range(3):
            result = self._row(args)
            if result is not None:
                return result
        return self._plain(args, "not_in_the_pool", "what they read was moved to make room")

    def _row(self, args: list[Any]) -> Result | None:
        """Rows 1, 2 and 4 for calls whose addresses are those of a recording; None if what is read was moved."""
        owner, layout, last = self.owner, self.layout, self._last
        if owner.bypassed is not None:
            return self._fallback.run_bypassed(args, owner.bypassed), None
        if self._check_layout and self.written and shared_with_written(args, self.written):
            why = "it writes inputs, and some of its inputs share memory"
            fix = "such calls run without a graph. Pass tensors that share none."
            self._say_once("shared", f"{why}: {fix}")
            return self._fallback.run(args), None
        shape, key = layout.shape_key(args), layout.static_key(args)
        if last is None or last[0] != shape or last[1] != key:
            last = (shape, key, self.table.recordings(shape, *layout.split(key)))
        if last[2] and not owner.driver.is_capturing():
            self._last = last
            recording = self._choose(last[2], args, key)
            if recording is not None:
                return self._replay(recording, args)
            if layout.static_key(args) != key:
                return None
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

    def _replay(self, recording: Recording, args: list[Any]) -> Result:
        self._draws = recording.draws
        self.owner.note_handed_out(recording)  # before it can be held, whatever happens
        outputs = recording.run(args)
        args.clear()
        stats = self.stats
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        return outputs, recording

    # ---- other calls

    def _without_recording(self, args: list[Any], shape: ShapeKey, key: bytes) -> Result | None:
        """The other rows, and row 1, 2 and 4 for calls that copy what is read in place elsewhere."""
        owner, fallback = self.owner, self._fallback
        fallback.raise_refusal()
        if owner.driver.is_capturing():
            return self._plain(args, "outer_capture", "somebody else captured a graph of them")
        if owner.closed or fallback.note_failure():
            return fallback.run(args), None
        found = self._inputs.find(args, key)
        seen = self.table.get((shape, found.places))
        if self.options.static_input_check == "error":
            self._refuse_moved(found, args)
        if seen is None or found.code is not None:
            return self._unrecorded(args, shape, found, key, seen)
        self._inputs.remember(args, found.new)
        if seen.left_plain is not None:
            return self._plain(args, *seen.left_plain)
        if found.copied:
            recording = self._choose(seen.recordings.get(found.values, ()), args, key)
            if recording is not None:
                return self._replay(recording, args)
            if self.layout.static_key(args) != key:
                return None
        return self._record_or_not(args, seen, found, key)

    def _record_or_not(
        self, args: list[Any], seen: Seen, found: Found, key: bytes
    ) -> Result | None:
        """Rows 3, 3b and 5."""
        owner, table = self.owner, self.table
        seen.storages = self._inputs.storages(args, found.places)
        self._close(table.drop_gone())
        if not table.has_room(seen.made_for):
            return self._full(args, seen.key[0])
        size = self.layout.bytes_that_move(args)
        if 0 < self._largest < size and not seen.recordings:
            owner.make_space()
        self._largest = max(self._largest, size)
        slot = self._slot_for(seen, found)
        if slot is None:
            owner.warn_of_held(self.name)
            limit = owner.max_pending_calls
            why = f"results of {many(limit, 'earlier call')} were still referenced, as many as max_pending_calls={limit} allows"
            return self._plain(args, "max_pending_calls", why)
        if self.layout.static_key(args) != key:
            return None
        return self._record_call(args, seen, found, key, slot)

    def _plain(self, args: list[Any], code: str, why: str, line: str | None = None) -> Result:
        """Run without a graph; nothing is remembered."""
        self.reasons.note(code, lambda: (why, line))
        outputs = self._fallback.run(args)
        self.owner.note_plain_results(outputs)
        return outputs, None

    def _unrecorded(
        self, args: list[Any], shape: ShapeKey, found: Found, key: bytes, seen: Seen | None
    ) -> Result:
        """Row 6: run without a graph; the key was seen from now on, as it is and as it will be in these places."""
        table, inputs = self.table, self._inputs
        if found.code == "not_in_the_pool" and seen and seen.recordings and not seen.is_gone:
            name, line = self._named(found.absent)
            return self._plain(args, found.code, f"what made {name} ran without a graph", line)
        storages = inputs.storages(args, found.places)
        if seen is None and not table.has_room(tuple(storages)):
            return self._full(args, shape)
        why = self._note_what_is_new(args, shape, found)
        inputs.remember(args, found.new)
        keys = {(shape, found.places): storages}
        places, _ = self.layout.split(key)  # some may be copied: as it will be in these places
        keys.setdefault((shape, places), inputs.storages(args, places))
        known = [table.get(each) for each in keys]
        self._draws = next((each.draws for each in known if each is not None), [])
        objects = tuple(args[i] for i in self.layout.objects)
        new = [Seen(*each, self._draws, objects) for each in reversed(keys.items())]
        outputs = self._warm_up(args, why)
        if self._due is None:
            for each in new:
                table.remember(each)
        else:
            self._due += new
        return outputs, None

    def _warm_up(self, args: list[Any], why: str | None = None) -> Sequence[Any]:
        """Run one call without a graph, which is no mere warm-up if `why` says so. To look for writes may wait."""
        stats, driver, start = self.stats, self.owner.driver, time.perf_counter()
        changes = Changes(args, self.layout.copied if self._check_layout else ())
        self._here.ran = True
        with torch_private.autocast_cache_off():
            if self.owner.has_recordings():
                outputs = self.fn(args)
            else:
                outputs = driver.warm_up(self.fn, args)
        self.history.warm_up_ms = (time.perf_counter() - start) * 1e3
        self.written |= changes.found()
        stats.warmups += why is None
        stats.plain_calls += why is not None
        self.owner.note_plain_results(outputs)
        return outputs

    # ---- what is said of it

    def _say_once(self, what: str, text: str) -> None:
        self._fallback.say_once(what, f"{self.name}: {text}")

    def _refuse_moved(self, found: Found, args: Sequence[Any]) -> None:
        recorded = self.stats.recordings > 0
        if self._check_layout:  # no module
            moved = found.new if recorded else ()
        else:
            moved = self._inputs.moves.found(args, self.layout.checked, recorded=recorded)
        if moved:
            names = describe_tensors(self.layout.infos, args, moved)
            raise StaticInputMovedError(
                f"{self.name}: static inputs moved or were replaced since they were recorded: {names}. Write new values "
                "into parameters and buffers (copy_, load_state_dict without assign=True), or use "
                'static_input_check="rerecord".'
            )

    def _note_what_is_new(self, args: Sequence[Any], shape: ShapeKey, found: Found) -> str | None:
        """Note why a call has no recording; says and returns it where such calls go on."""
        infos, last = self.layout.infos, self.table.newest
        code, new, why = "new_tensor", found.new or found.absent, None
        if last is not None:
            if last[0] != shape:
                code, new = "new_shape", self.layout.changed(last[0], shape)
            self.reasons.note_changed(code, [(infos[i].name, infos[i].line) for i in new])
        self._unseen += 1
        names = describe_tensors(infos, args, found.new or found.absent)
        why_not = _CANNOT_BE_COPIED.get(found.code or "", "").format(self.options.max_copied_mib)
        last, in_a_row = self._moved
        in_a_row = in_a_row + 1 if last == self.stats.calls - 1 else 1
        if why_not:
            self._moved = self.stats.calls, in_a_row
        if self._unseen >= 2 * self.options.max_recordings:
            cause, fix = f"each came with other parameters: {names}", _WRITE_IN_PLACE
            if code == "new_shape":
                cause, fix = _never_repeats(self.layout, new, args)
            text = f"{self._unseen} calls came that were never recorded, since {cause}"
            self._say_once("unseen", f"{text}. {fix}")
            why = None if code == "new_shape" else text
        elif why_not and in_a_row > 2:
            fix = _WRITE_IN_PLACE if found.new else _LEAVE_IN_PLACE
            why = f"{names} lie at a new place in every call, and {why_not}"
            self._say_once("places", f"{why}: such calls run without a graph. {fix}")
        if why is not None:
            told = why, self._named(new)[1]
            self.reasons.note(code, lambda: told)
        return why

    def _full(self, args: list[Any], shape: ShapeKey) -> Result:
        limit, recorded = self.options.max_recordings, self.table.recorded_shape()
        changed = self.layout.changed(recorded, shape) if recorded else ()
        name, line = self._named(changed) if changed else ("what other partitions hand it", None)
        self._say_once(
            "full",
            f"has as many recordings as max_recordings={limit} allows: calls with another value or layout of {name} run "
            "without a graph, known ones keep replaying. Keep to a few sizes (pad), or raise the option.",
        )
        why = f"as many shapes are recorded as max_recordings={limit} allows, and another value or layout of {name} came"
        return self._plain(args, "max_recordings", why, line)

    def _named(self, positions: Sequence[int]) -> tuple[str, str | None]:
        """Names of inputs, at most three of them, and the first of the user's lines that read them."""
        infos = [self.layout.infos[i] for i in positions]
        more = f" and {len(infos) - 3} more" if len(infos) > 3 else ""
        line = next((info.line for info in infos if info.line is not None), None)
        return ", ".join(info.name for info in infos[:3]) + more, line

    # ---- recordings

    def _record_call(
        self, args: list[Any], seen: Seen, found: Found, key: bytes, slot: int
    ) -> Result:
        """Record a call and replay it; where that fails, run it without a graph."""
        self._unseen = 0
        with self.owner.changing():
            recording = self._attempt(args, seen, found, slot)
            if isinstance(recording, torch.OutOfMemoryError):
                give_memory_back(recording, self.owner.driver.device)
                again = self._slot_for(seen, found)  # not where inputs lie that died in the capture
                if again is not None:
                    recording = self._attempt(args, seen, found, again)
            if isinstance(recording, Recording):
                self._add(recording, args, seen, found, key)
        if isinstance(recording, Recording):
            return self._replay(recording, args)
        error, recording = recording, None
        try:
            return self._run_without(args, seen, error), None
        finally:
            del error  # its traceback holds this frame, and with it this call's inputs

    def _add(
        self, recording: Recording, args: list[Any], seen: Seen, found: Found, key: bytes
    ) -> None:
        recording.made_for, recording.draws = seen.made_for, seen.draws
        if self.is_backward and not self._first_slot:
            recording.backward = self
        self.owner.add_recording(recording)
        self.stats.recordings += 1
        cause = self.history.add(self._started, self.layout, seen, found, args, recording)
        self.stats.rerecordings += cause == "moved"
        recordings = self.table.add(seen, found.values, recording)
        if not found.copied:
            self._last = (seen.key[0], key, recordings)

    def _slot_for(self, seen: Seen, found: Found) -> int | None:
        """See `Owner.slot_for`."""
        beside = [r for r in seen.recordings.get(found.values, ()) if r.made_for == seen.made_for]
        return self.owner.slot_for(len(beside), first=self._first_slot)

    def _attempt(
        self, args: list[Any], seen: Seen, found: Found, slot: int
    ) -> Recording | Exception | None:
        """A recording, what it failed with, or None if this call is none for it."""
        self._started = time.perf_counter()
        try:
            # Memory of recordings is written in whatever mode later calls come: no inference tensors.
            told = progress.shown(f"recording {self.name}", self.options.progress)
            with told, torch.inference_mode(False), torch.no_grad():
                if not self._ran_here:
                    self.owner.driver.prepare_thread()
                uses = self.visible, self.read
                recording = self._recorder.record(
                    args, slot, uses=uses, copied=found.copied, written=self.written
                )
                if self._check_layout:
                    self.written |= recording.written
                if self._check_layout and shared_with_written(args, self.written):
                    recording.close(whole_pool=False)
                    return None
                return recording
        except Exception as error:
            mend(open_modes)
            return error

    @property
    def _ran_here(self) -> bool:
        return getattr(self._here, "ran", False)

    def _run_without(self, args: list[Any], seen: Seen, error: Exception | None) -> Sequence[Any]:
        """Make a call that could not be recorded."""
        fallback = self._fallback
        if error is None:
            return fallback.run(args)
        no_memory, unstaged = (
            isinstance(error, torch.OutOfMemoryError),
            isinstance(error, StagingError),
        )
        is_odd = unstaged or (fallback.on_failure is None and not is_capture_error(error))
        if not (no_memory or self._tried_anew) and (is_odd or not self._ran_here):
            self._tried_anew = True  # it may succeed later, or once this thread ran a call
            return self._warm_up(args)
        if no_memory or unstaged:
            give_memory_back(error, self.owner.driver.device)
            seen.left_plain = fallback.leaves_plain(error)
            return self._plain(args, *seen.left_plain)[0]
        return fallback.run_failed(args, error)

    def _close(self, recordings: Sequence[Recording]) -> None:
        if recordings:
            self._last = None
            with self.owner.changing():
                for recording in recordings:
                    self.owner.close_recording(recording)

    def move_apart(self, by: Recording) -> None:
        """Have gradients that are kept while a forward runs lie in a pool that this one does not write, from now on."""
        self._first_slot = by.slot + 1
        self.forget_recordings()

    def forget_recordings(self) -> None:
        """Drop every recording; calls of keys seen so far record at once."""
        self._largest = 0
        self._close(self.table.drop(lambda recording: True))

    def close(self) -> None:
        """Drop every recording; the next calls warm up again unless the owner is closed."""
        self._last = None
        self._close(self.table.clear())
        self._inputs.forget()
        self._first_slot = 0
        self.history.forget("recordings were freed: cgpass.reset(), or a failed capture")

    def forget_failures(self) -> None:
        """See `Member`."""
        self._tried_anew = False
        self._fallback.forget()


def _never_repeats(
    layout: Layout, positions: Sequence[int], args: Sequence[Any]
) -> tuple[str, str]:
    """Why calls that differ in these inputs were never recorded, and what to do: of sizes alone, if some are among them."""
    infos = layout.infos
    numbers = [i for i in positions if infos[i].kind is InputKind.SYMINT]
    told = [i for i in numbers if is_size(infos[i].name)] or numbers
    if not told:
        what = describe(infos[i] for i in positions)
        if positions and all(i in layout.objects for i in positions):
            return f"each came with another object for {what}", "Pass the same one in each call."
        return f"each came with another size or layout of {what}", "Keep to a few sizes: pad it."
    texts, fixes = zip(*(new_value(infos[i].name) for i in told), strict=True)
    named = []
    for text, i in list(zip(texts, told, strict=True))[:3]:
        line = f", read at {infos[i].line}" if infos[i].line else ""
        named.append(f"{text} ({args[i]} in this call{line})")
    fix = "; ".join(dict.fromkeys(fixes))
    verb = "takes" if len(named) == 1 else "take"
    return f"{' and '.join(named)} {verb} new values all the time", f"{fix[0].upper()}{fix[1:]}."
