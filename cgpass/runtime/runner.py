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

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from cgpass import errors
from cgpass.compile.facts.input_info import InputInfo
from cgpass.errors import StaticInputMovedError
from cgpass.options import Options
from cgpass.runtime import changes, native
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import Fallback, OnFailure, give_memory_back
from cgpass.runtime.owner import Owner
from cgpass.runtime.recorder import Recorder, WarmUp
from cgpass.runtime.recording import Recording
from cgpass.runtime.rng_states import forward_states, note_positions
from cgpass.runtime.rule import Found, Inputs
from cgpass.runtime.seeds import put_on_the_device
from cgpass.runtime.signature import (
    Layout,
    ShapeKey,
    StaticKey,
    describe,
    describe_tensors,
    what_never_repeats,
)
from cgpass.runtime.table import History, RecordingTable, Seen
from cgpass.runtime.writes import shares_memory
from cgpass.telemetry import CallStats, new_call_stats, progress
from cgpass.telemetry.reason import CallReasons, many
from cgpass.telemetry.tracing import NOWHERE, Source

log = logging.getLogger(__name__)

_CANNOT_BE_COPIED = {
    "in_place": "can't be copied, since an optimizer writes them",
    "too_large": "are too large to be copied (max_copied_mib={})",
    "whole_storage": "can't be copied, since more of their storages is read than they are",
    "shares_memory": "can't be copied, since an input that is written shares memory with another",
}
"""Codes of `rule.Found` whose inputs would be copied otherwise, and why they are not."""

Result = tuple[Sequence[Any], Recording | None]
"""A call's outputs, and the recording that made them (None if they were made without a graph)."""


def _named(infos: Sequence[InputInfo]) -> tuple[str, str | None]:
    """Names of inputs, at most three of them, and the first of the user's lines that read them."""
    more = f" and {len(infos) - 3} more" if len(infos) > 3 else ""
    line = next((info.line for info in infos if info.line is not None), None)
    return ", ".join(info.name for info in infos[:3]) + more, line


class PartitionRunner:
    """Runs one captured partition. See Note [What a call does]."""

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
        self.is_backward = is_backward
        """Whether outputs are gradients, which may be kept while other partitions run."""
        self.communicates = communicates
        """Whether `fn` communicates with other processes, which take no part in runs that this one makes alone."""
        self._check_layout = check_layout
        """Whether tensors' sizes, strides and dtypes belong to the signature, since no guard covers them."""
        self.stats: CallStats = new_call_stats()
        self.visible: frozenset[int] | None = None
        """Outputs that the user gets, None for all; to be set before the first call."""
        self.read: frozenset[int] = frozenset()
        """Outputs that other partitions or the backward read; to be set before the first call."""
        self.written: frozenset[int] = frozenset()
        """Inputs that plain calls and recordings turned out to write, where nobody told."""
        self.reasons = CallReasons()
        """Why calls ran without a graph."""
        self.layout = Layout(
            infos,
            check_static=options.static_input_check != "off",
            check_layout=check_layout,
        )
        self.table = RecordingTable(options.max_recordings)
        self._inputs = Inputs(
            self.layout,
            owner,
            max_places=options.max_recordings,
            max_copied=options.max_copied_mib << 20,
        )
        self._fallback = Fallback(
            self.name,
            fn,
            self.stats,
            on_skip=options.on_skip,
            on_failure=on_failure,
            reasons=self.reasons,
        )
        self._recorder = Recorder(
            fn, owner, opaque=opaque, finds_writes=check_layout, stats=self.stats
        )
        self._warm_ups = WarmUp(fn, owner)
        self.history = History(name, self._warm_ups, source)
        self._first_slot = 0
        """Slots before this one do not suit: see `move_apart`."""
        self._largest = 0
        """Bytes of the inputs that move, of the largest call recorded."""
        self._new_modules = 0
        """Calls since the last recording whose parameters were taken for another module's: for a warning alone."""
        self._had_new_places = False
        """Whether the last call without a recording had inputs at new places that could not be copied."""
        self._draws: list[int] = []
        """Of this call's key: see `Seen.draws`."""
        self._last: tuple[ShapeKey, StaticKey, list[Recording]] | None = None
        owner.add(self)
        native.loader.start(options.progress)

    @property
    def failure(self) -> str | None:
        """Why the partition is captured no more."""
        return self._fallback.failure

    @property
    def opaque(self) -> bool:
        """Whether kernels of `fn` bypass aten."""
        return self._recorder.opaque

    @property
    def owns_outputs(self) -> bool:
        """Whether users own what they get, so that whoever calls `run` copies it. See Note [Calls from several threads]."""
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
        start, self._draws = states[0].start(), []
        outputs, recording = self._run(args)
        note_positions(states, start, self._draws, replayed=recording is not None)
        return outputs, recording

    def _run(self, args: list[Any], *, again: bool = False) -> Result:
        """Rows 1 to 4."""
        owner, layout = self.owner, self.layout
        if owner.bypassed is not None:
            return self._fallback.run_bypassed(args, owner.bypassed), None
        shape, key = layout.shape_key(args), layout.static_key(args)
        last = self._last
        if last is not None and last[0] == shape and last[1] == key:
            recordings = last[2]
        else:
            recordings = self._recordings(shape, *layout.split(key))
        if recordings and not owner.driver.is_capturing():
            self._last = (shape, key, recordings)
            recording = self._choose(recordings, args, key)
            if recording is not None:
                return self._replay(recording, args), recording
            moved = layout.static_key(args)  # to rescue some may have moved what is read
            if moved != key and not again:
                return self._run(args, again=True)
            key = moved
        return self._without_recording(args, shape, key, again=again)

    def _recordings(self, shape: ShapeKey, places: bytes, values: bytes) -> list[Recording]:
        seen = self.table.get((shape, places))
        return [] if seen is None else seen.recordings.get(values, [])

    def _choose(
        self, recordings: Sequence[Recording], args: list[Any], key: StaticKey
    ) -> Recording | None:
        """One that overwrites nothing that is referenced, if need be after that was rescued; None if there is none."""
        owner = self.owner
        for recording in recordings:
            if owner.is_safe(recording) and recording.may_replay(args):
                return recording
        for recording in recordings:
            if recording.may_replay(args) and owner.rescue(recording):
                moved = self.layout.static_key(args) != key  # what is read was among what was moved
                may = not (moved or recording.closed) and recording.may_replay(args)
                return recording if may else None
        return None

    def _replay(self, recording: Recording, args: list[Any]) -> list[Any]:
        self._draws = recording.draws
        self.owner.note_handed_out(
            recording
        )  # first: what comes of it may be held whatever happens
        outputs = recording.run(args)
        args.clear()
        stats = self.stats
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        return outputs

    # ---- calls that are no replay of what was read in place

    def _without_recording(
        self, args: list[Any], shape: ShapeKey, key: StaticKey, *, again: bool
    ) -> Result:
        result = self._left_plain(args)
        if result is not None:
            return result
        found = self._inputs.find(args, key)
        seen = self.table.get((shape, found.places))
        if self.options.static_input_check == "error":
            recorded = self.stats.recordings > 0
            self._refuse_moved(self._inputs.moved(args, key, found, recorded=recorded), args)
        if found.code == "not_in_the_pool" and seen and seen.recordings and not seen.is_gone:
            names, line = _named([self.layout.infos[i] for i in found.absent])
            return self._plain(args, found.code, f"what made {names} ran without a graph", line)
        if seen is None and not self.table.has_room(
            tuple(self._inputs.storages(args, found.places))
        ):
            return self._full(args, shape)
        if seen is None or found.code is not None:
            return self._unseen(args, shape, found, key)
        self._inputs.remember(args, key, found)
        if seen.left_plain is not None:
            return self._plain(args, "out_of_memory", seen.left_plain)
        if found.copied:
            recordings = seen.recordings.get(found.values, [])
            recording = self._choose(recordings, args, key)
            if recording is not None:
                return self._replay(recording, args), recording
            if not again and self.layout.static_key(args) != key:
                return self._run(args, again=True)
        return self._record_or_not(args, seen, found, key, again=again)

    def _left_plain(self, args: list[Any]) -> Result | None:
        """Row 1, but for keys that are left plain."""
        fallback = self._fallback
        fallback.raise_refusal()
        if self.owner.driver.is_capturing():
            return self._plain(args, "outer_capture", "somebody else captured a graph of them")
        if self.owner.closed or fallback.note_failure():
            return fallback.run(args), None
        return None

    def _record_or_not(
        self, args: list[Any], seen: Seen, found: Found, key: StaticKey, *, again: bool
    ) -> Result:
        """Rows 3, 3b and 5."""
        storages = self._inputs.storages(args, found.places)
        made_for = tuple(storages)
        self.table.renew(seen, tuple(storages.values()), made_for)
        self._close(self.table.drop_gone())
        if not self.table.has_room(made_for):
            return self._full(args, seen.key[0])
        size = self.layout.bytes_that_move(args)
        if 0 < self._largest < size and not seen.recordings:
            self.owner.make_space()
        self._largest = max(self._largest, size)
        number = sum(r.made_for == made_for for r in seen.recordings.get(found.values, ()))
        slot = self.owner.slot_for(number, first=self._first_slot)
        if slot is None:
            self.owner.warn_of_held(self.name)
            limit = self.owner.max_pending_calls
            why = f"results of {many(limit, 'earlier call')} were still referenced, as many as max_pending_calls={limit} allows"
            return self._plain(args, "max_pending_calls", why)
        if self.layout.static_key(args) != key:
            if not again:
                return self._run(args, again=True)
            return self._plain(args, "not_in_the_pool", "what they read was moved to make room")
        return self._record_call(args, seen, found, key, slot)

    def _plain(self, args: list[Any], code: str, why: str, line: str | None = None) -> Result:
        """Run without a graph; nothing is remembered."""
        self.reasons.note(code, lambda: (why, line))
        outputs = self._fallback.run(args)
        self.owner.note_plain_results(outputs)
        return outputs, None

    def _unseen(self, args: list[Any], shape: ShapeKey, found: Found, key: StaticKey) -> Result:
        """Row 6: run without a graph; the key was seen from now on, as it is and as it will be in these places."""
        places, _ = self.layout.split(key)
        self._note_what_is_new(args, shape, places, found)
        keys = (
            [(shape, places)] if found.code else [(shape, each) for each in {places, found.places}]
        )
        known = (self.table.get(each) for each in keys)
        draws = self._draws = next((seen.draws for seen in known if seen is not None), [])
        new = [self._new_key(args, each, draws) for each in keys]
        self._inputs.remember(args, key, found)
        outputs = self._warm_up(args)
        for each in new:
            self.table.remember(each)
        return outputs, None

    def _new_key(self, args: Sequence[Any], key: tuple[ShapeKey, bytes], draws: list[int]) -> Seen:
        storages = self._inputs.storages(args, key[1])
        objects = tuple(args[i] for i in self.layout.objects)
        return Seen(key, tuple(storages.values()), tuple(storages), draws, objects)

    def _warm_up(self, args: list[Any]) -> Sequence[Any]:
        check = not self.stats.warmups and self._fallback.checks_warm_ups
        compared = self.layout.copied if self._check_layout else ()
        outputs = self._warm_ups.run(args, check_syncs=check, compared=compared)
        self.written |= self._warm_ups.found_written
        self.stats.warmups += 1
        self.owner.note_plain_results(outputs)
        return outputs

    # ---- what is said of it

    def _refuse_moved(self, moved: Sequence[int], args: Sequence[Any]) -> None:
        if moved:
            names = describe_tensors(self.layout.infos, args, moved)
            raise StaticInputMovedError(
                f"{self.name}: static inputs moved or were replaced since they were recorded: {names}. Write new values "
                "into parameters and buffers (copy_, load_state_dict without assign=True), or use "
                'static_input_check="rerecord".'
            )

    def _note_what_is_new(
        self, args: Sequence[Any], shape: ShapeKey, places: bytes, found: Found
    ) -> None:
        infos = self.layout.infos
        last, code, new = self.table.newest, "new_tensor", list(found.new)
        if last is not None and last[0] != shape:
            code, new = "new_shape", self.layout.changed(last[0], shape)
            mine = tuple(self._inputs.storages(args, places))
            if "sizes" not in self._fallback.said and self.table.is_full_of_unseen(mine):
                self._say_never_recorded(new, args)
        if last is not None:
            self.reasons.note_changed(code, [(infos[i].name, infos[i].line) for i in new])
        if found.code == "new_module":
            self._new_modules += 1
            if self._new_modules == 2 * self.options.max_recordings:
                self._say_others(found, args)
        cannot_be_copied = found.code in _CANNOT_BE_COPIED
        if cannot_be_copied and self._had_new_places:
            self._say_moving(found, args)
        self._had_new_places = cannot_be_copied

    def _say_never_recorded(self, changed: Sequence[int], args: Sequence[Any]) -> None:
        why, fix = what_never_repeats(self.layout, changed, args)
        limit = self.options.max_recordings
        self._say_once("sizes", f"{limit} calls came that were never recorded, since {why}. {fix}.")

    def _say_others(self, found: Found, args: Sequence[Any]) -> None:
        names = describe_tensors(self.layout.infos, args, found.new)
        self._say_once(
            "modules",
            f"{self._new_modules} calls came with other parameters, none of which came again: {names}. Such calls run "
            "without a graph. Write new values into parameters (copy_, load_state_dict without assign=True) instead of "
            "replacing them.",
        )

    def _say_moving(self, found: Found, args: Sequence[Any]) -> None:
        names = describe_tensors(self.layout.infos, args, found.new or found.absent)
        why = _CANNOT_BE_COPIED[found.code or ""].format(self.options.max_copied_mib)
        fix = (
            "Write new values into parameters and buffers (copy_) instead of replacing them."
            if found.new
            else "Leave saved tensors where they lie (hooks and offloading move them), or raise max_copied_mib."
        )
        self._say_once(
            "places",
            f"{names} lie at a new place in every call, and {why}: such calls run without a graph. {fix}",
        )

    def _full(self, args: list[Any], shape: ShapeKey) -> Result:
        limit, infos = self.options.max_recordings, self.layout.infos
        recorded = self.table.recorded_shape()
        new = [infos[i] for i in self.layout.changed(recorded, shape)] if recorded else []
        other = "what other partitions hand it"
        self._say_once(
            "full",
            f"has as many recordings as max_recordings={limit} allows: calls with another value or layout of "
            f"{describe(new) or other} run without a graph, known ones keep replaying. Keep to a few sizes (pad), or raise "
            "the option.",
        )
        names, line = _named(new)
        why = f"as many shapes are recorded as max_recordings={limit} allows, and another value or layout of {names or other} came"
        return self._plain(args, "max_recordings", why, line)

    def _say_once(self, what: str, text: str) -> None:
        self._fallback.say_once(what, f"{self.name}: {text}")

    # ---- recordings

    def _record_call(
        self, args: list[Any], seen: Seen, found: Found, key: StaticKey, slot: int
    ) -> Result:
        if self._warm_ups.found_syncs:
            self._warm_ups.found_syncs = False
            if self._fallback.is_to_blame(args, None):
                self.close()
                self._fallback.note_failure()
                return self._fallback.run(args), None
        self._new_modules = 0
        with self.owner.changing():
            started = time.perf_counter()
            recording = self._attempt(args, seen, found, slot)
            if isinstance(recording, torch.OutOfMemoryError):
                give_memory_back(recording, self.owner.driver.device)
                recording = self._attempt(args, seen, found, slot)
            if isinstance(recording, Recording):
                self._add(recording, args, seen, found, key, started)
        if isinstance(recording, Recording):
            return self._replay(recording, args), recording
        error, recording = recording, None
        try:
            return self._run_without(args, seen, error), None
        finally:
            del error  # its traceback holds this frame, and with it this call's inputs

    def _add(
        self,
        recording: Recording,
        args: list[Any],
        seen: Seen,
        found: Found,
        key: StaticKey,
        started: float,
    ) -> None:
        recording.made_for, recording.draws = seen.identities, seen.draws
        self.owner.add_recording(recording)
        self.stats.recordings += 1
        cause = self.history.add(started, self.layout, seen, found, args, recording)
        self.stats.rerecordings += cause == "moved"
        recordings = self.table.add(seen, found.values, recording)
        if not found.copied:
            self._last = (seen.key[0], key, recordings)

    def _attempt(
        self, args: list[Any], seen: Seen, found: Found, slot: int
    ) -> Recording | Exception | None:
        """A recording, what it failed with, or None if this call is none for it."""
        try:
            # Memory of recordings is written in whatever mode later calls come: no inference tensors.
            told = progress.shown(f"recording {self.name}", self.options.progress)
            with told, torch.inference_mode(False), torch.no_grad():
                return self._record(args, seen, found, slot)
        except errors.CollectiveTimeoutError:
            raise
        except Exception as error:
            changes.mend(changes.open_modes)
            return error

    def _record(self, args: list[Any], seen: Seen, found: Found, slot: int) -> Recording | None:
        if not self._warm_ups.ran_here:
            self.owner.driver.prepare_thread()
        recording = self._recorder.record(
            args,
            self.layout,
            slot,
            uses=(self.visible, self.read),
            copied=found.copied,
            written=self.written,
        )
        if self._check_layout:
            self.written |= recording.written
        if not recording.fits(args) or (self._check_layout and shares_memory(args, self.written)):
            recording.close(whole_pool=False)
            return None
        return recording

    def _run_without(self, args: list[Any], seen: Seen, error: Exception | None) -> Sequence[Any]:
        """Make a call that could not be recorded."""
        fallback = self._fallback
        if error is None:
            return fallback.run(args)
        if isinstance(error, torch.OutOfMemoryError):
            give_memory_back(error, self.owner.driver.device)
            seen.left_plain = fallback.no_memory(error)
            return self._plain(args, "out_of_memory", seen.left_plain)[0]
        if self._warm_ups.first_here():
            return self._warm_up(args)
        if fallback.is_to_blame(args, error):
            self.close()
            fallback.note_failure()
            return fallback.run(args)
        return fallback.run_again(args, error)

    def would_move_apart(self, victim: Recording, by: Recording) -> bool:
        """See `Member`: gradients that are kept while a forward runs get a pool that it does not write, once."""
        if not self.is_backward or self._first_slot:
            return False
        own = self.table.all()
        return victim in own and by not in own

    def move_apart(self, by: Recording) -> None:
        """See `Member`."""
        self._first_slot = by.slot + 1
        self.forget_recordings()

    def _close(self, recordings: Sequence[Recording]) -> None:
        if recordings:
            self._last = None
            with self.owner.changing():
                for recording in recordings:
                    self.owner.close_recording(recording)

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
        self._fallback.forget()
