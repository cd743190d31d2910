"""`PartitionRunner`: records a boxed callable once per signature and replays it."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from cgpass import progress
from cgpass.inputs import InputInfo
from cgpass.reason import CallReasons
from cgpass.runtime import native, plain_reasons
from cgpass.runtime.actions import Action, decide
from cgpass.runtime.attempts import Attempts
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import Resplit
from cgpass.runtime.gathered import Gathered
from cgpass.runtime.history import History
from cgpass.runtime.owner import Owner
from cgpass.runtime.placement import Placement
from cgpass.runtime.recorder import Recorder
from cgpass.runtime.recording import Recording
from cgpass.runtime.rerecording import Rerecording
from cgpass.runtime.rng_states import forward_states, note_positions
from cgpass.runtime.seeds import put_on_the_device
from cgpass.runtime.settings import RunnerSettings
from cgpass.runtime.signature import ShapeKey, StaticKey, describe
from cgpass.runtime.stationary import Watch
from cgpass.runtime.strays import Strays, copied_instead
from cgpass.runtime.warmup import WarmUp
from cgpass.runtime.writes import shares_memory
from cgpass.telemetry import CallStats, new_call_stats
from cgpass.tracing import NOWHERE, Source

log = logging.getLogger(__name__)


class PartitionRunner:
    """Runs one captured partition: warm-up, record, replay, or plainly. See Note [What a call does]."""

    def __init__(
        self,
        fn: BoxedCallable,
        infos: Sequence[InputInfo],
        owner: Owner,
        settings: RunnerSettings,
        *,
        name: str,
        resplit: Resplit | None = None,
        source: Source = NOWHERE,
    ) -> None:
        """Wrap `fn`.

        Args:
            fn: Takes one list of inputs and returns a sequence of outputs. Writes only inputs marked `mutated`.
            infos: Its inputs.
            owner: Pool, driver and liveness shared with other runners.
            settings: What it may do.
            name: For messages.
            resplit: What to do when a capture fails; default: run plainly from then on.
            source: What it is a part of.
        """
        self.name = source.of(name)
        self.owner = owner
        self.stats: CallStats = new_call_stats()
        self.visible: frozenset[int] | None = None
        """Outputs that the user gets, None for all; to be set before the first call."""
        self.read: frozenset[int] = frozenset()
        """Outputs that other partitions or the backward read; to be set before the first call."""
        self.copied: frozenset[int] = frozenset()
        """Visible outputs that whoever calls `run` has to copy out of the pool. Replaced when that changes."""
        self._placement = Placement(self.name, owner)
        self.fn = fn
        self.settings = settings
        self.written: frozenset[int] = frozenset()
        """Inputs that plain calls and recordings turned out to write, where nobody told."""
        self._recorder = Recorder(
            fn, owner, opaque=settings.opaque, finds_writes=settings.check_layout, stats=self.stats
        )
        self._forget_moves()
        self.reasons = CallReasons()
        """Why calls ran without a graph, or warmed up again and again."""
        self._fallback = settings.fallback(self.name, fn, self.stats, resplit, self.reasons, owner)
        self._warm_ups = WarmUp(fn, owner)
        self.history = History(name, self._warm_ups, source)
        told = partial(progress.shown, f"recording {self.name}", settings.progress)
        self._attempts = Attempts(owner, self._warm_ups, self._fallback, self.stats, told)
        self._set_infos(infos)
        self._gathered = Gathered(self.layout.parameters)
        owner.add(self)
        native.loader.start()

    @property
    def failure(self) -> str | None:
        """Why the partition is captured no more, if nothing replaces it."""
        return self._fallback.failure

    @property
    def timed(self) -> str | None:
        """What was measured of replays and plain calls, once that decided whether to capture it."""
        return self._fallback.worth.found

    @property
    def owns_outputs(self) -> bool:
        """Whether users own what they get. See Note [Calls from several threads]."""
        return self.owner.several_threads or self.settings.outputs == "owned"

    def _set_infos(self, infos: Sequence[InputInfo]) -> None:
        self.layout = self.settings.layout(infos)
        self.table = self.settings.table(self.name, self.layout, self.stats, self.reasons)
        self._last: tuple[ShapeKey, StaticKey, list[Recording]] | None = None

    # ---- a call

    def run(self, args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
        """Run one call, which empties the list of its inputs.

        Returns:
            The outputs, and the recording that made them (None if they were made plainly).
            **Lifetime:** outputs of a recording lie in the pool. They stay valid as long as somebody holds them,
            since no recording is replayed over held memory; placeholders and temporaries do not.
        """
        self.stats.calls += 1
        if self.layout.seeds:
            put_on_the_device(args, self.layout.seeds, self.owner.driver.device)
        states = forward_states(args, self.layout.objects) if self.layout.objects else ()
        if not states:
            return self._run(args)
        key, start = self.layout.shape_key(args), states[0].start()
        outputs, recording = self._run(args)
        note_positions(states, start, self.table.draws(key), replayed=recording is not None)
        return outputs, recording

    def _run(self, args: list[Any]) -> tuple[Sequence[Any], Recording | None]:
        if self.owner.bypassed:
            return self._fallback.run_bypassed(args, asked=self.owner.plain), None
        if self.owner.starts.wanted:
            self.owner.start_over_if_idle()
        layout = self.layout
        shape_key, static_key = layout.shape_key(args), layout.static_key(args)
        last = self._last
        if last is not None and last[0] == shape_key and last[1] == static_key:
            recordings = last[2]
        else:
            recordings = self.table.find(shape_key, static_key)
        if recordings and not self.owner.driver.is_capturing():
            recording = self._choose(recordings, args, static_key)
            if recording is not None:
                if recording.watch is not None and recording.stays(args):
                    self.owner.ask_to_start_over()
                self._last = (shape_key, static_key, recordings)
                return self._replay(recording, args), recording
        return self._without_recording(args, shape_key, static_key)

    def _choose(
        self, recordings: Sequence[Recording], args: Sequence[Any], static_key: StaticKey
    ) -> Recording | None:
        """A recording that overwrites nothing that is held, if need be after what is held was rescued."""
        owner = self.owner
        for recording in recordings:
            if owner.is_safe(recording) and recording.may_replay(args):
                return recording
        for recording in recordings:
            if recording.may_replay(args) and owner.rescue(recording):
                # which may have replaced this very recording, or moved what it reads
                kept = recording in self.table.all() and recording.may_replay(args)
                return recording if kept and self.layout.static_key(args) == static_key else None
        return None

    def _replay(self, recording: Recording, args: list[Any]) -> list[Any]:
        outputs = recording.run(args)
        args.clear()
        stats = self.stats
        stats.replays += 1
        stats.copied_bytes += recording.copied_bytes
        recording.last_used = stats.calls
        self.owner.note_handed_out(recording)
        return outputs

    def _without_recording(
        self, args: list[Any], shape_key: ShapeKey, static_key: StaticKey
    ) -> tuple[Sequence[Any], Recording | None]:
        self._fallback.raise_refusal()
        if self._fallback.replacement is not None:
            return self._fallback.run(args), None
        ran_backward = self.owner.ran_backward and not self.settings.is_backward
        is_late = ran_backward or self.owner.has_recordings()
        new_module = self._gathered.note(args, is_late=is_late)
        warm = not new_module and self.table.is_warm(shape_key, static_key, args)
        strays = self._find_strays(args) if warm else []
        if strays:  # which may have changed what is copied
            static_key = self.layout.static_key(args)
        new = not self.table.has_recordings(shape_key)
        if strays and (new or self._strays.are_of_warm_up(args, strays)):
            warm, strays = False, []  # what made the inputs was itself warming up
        usable = self._is_usable() and not strays
        waits = self._rerecording.waits
        if warm and usable:
            keys = (shape_key, static_key)
            usable = self._rerecording.is_over(self.table, self.layout, keys, args)
        room = usable and self._make_room(shape_key, static_key, args)
        slot = self._slot(shape_key, static_key, args) if warm and room else 0
        held = slot is None and not self._rerecording.waits
        if warm and room and self.layout.static_key(args) != static_key:
            slot = None  # room was made by moving what this call reads
        action = decide(usable=usable, warm=warm, safe=False, room=room and slot is not None)
        full = warm and usable and not room
        note = self.table.note_full if full else self.table.note_unknown
        if (full or action is not Action.PLAIN) and (moving := note(shape_key, static_key, args)):
            self._settle(moving)
            return self._run(args)
        if action is Action.RECORD and slot is not None:
            return self._record_call(args, shape_key, static_key, slot)
        if action is Action.WARM_UP:
            identities = self.table.identities(args)
            outputs = self._warm_up(args, shape_key)
            self.table.add_warmup(shape_key, static_key, identities)
            self.stats.warmups += 1
        else:
            self._note_plain(strays, refused=usable and not room, held=held)
            waits = waits or self._rerecording.waits
            outputs = self._fallback.run(args)
            if waits:  # whoever reads them is to be recorded later, too
                self.owner.note_warm_up(outputs)
        return outputs, None

    def _note_plain(self, strays: Sequence[int], *, refused: bool, held: bool) -> None:
        """Note why a call runs without a graph."""
        if not self._fallback.note_failure():
            plain_reasons.note(
                self.reasons,
                self.layout.infos,
                is_capturing=self.owner.driver.is_capturing(),
                strays=strays,
                refusal=self.table.reached.refusal if refused else None,
                held=self.owner.max_pending_calls if held else None,
            )

    def _record_call(
        self, args: list[Any], shape_key: ShapeKey, static_key: StaticKey, slot: int
    ) -> tuple[Sequence[Any], Recording | None]:
        native.loader.wait(self.settings.progress)
        watch, keys = self.table.watch(shape_key, static_key, args), (shape_key, static_key)
        cause = self.history.cause(self.layout, keys, args, self.table.find(*keys))
        record = partial(self._record, args, slot, watch)
        recording = self._attempts.make(record, args, self.close)
        if not isinstance(recording, Recording):
            error, recording = recording, None
            try:
                return self._attempts.run_without(args, error, self.close), None
            finally:
                del error  # its traceback holds this frame, and with it this call's inputs
        self.history.add(cause, self.layout, keys, args, recording)
        recordings = self.table.add(*keys, args, recording)
        self._last = (*keys, recordings)
        return self._replay(recording, args), recording

    def _warm_up(self, args: list[Any], shape_key: ShapeKey) -> Sequence[Any]:
        is_last = self.table.num_warmups(shape_key) + 1 >= self.settings.limits.num_warmup_calls
        check = is_last and not self.stats.recordings and self._fallback.checks_warm_ups
        compared = self.layout.copied if self.settings.check_layout else ()
        outputs = self._warm_ups.run(args, check_syncs=check, compared=compared)
        self.written |= self._warm_ups.found_written
        return outputs

    def _is_usable(self) -> bool:
        fails = self._fallback.failure is not None
        return not (fails or self.owner.closed or self.owner.driver.is_capturing())

    def _find_strays(self, args: Sequence[Any]) -> list[int]:
        """Pooled inputs that are not where a recording put them; if that goes on, they become copied ones."""
        strays = self._strays.find(args, self.layout.pooled, self.stats.calls)
        if strays and self._strays.persist(args, strays):
            self._copy_instead(strays)
        return strays

    def _copy_instead(self, positions: Sequence[int]) -> None:
        """Copy inputs that were read where they lay, from now on."""
        before, infos = self.table, self.layout.infos
        what = f"copies {describe(infos[i] for i in positions)} from now on"
        log.info("%s %s", self.name, what)
        self.forget_recordings()
        self.history.forget(f"it {what}")
        self._set_infos(copied_instead(infos, positions))
        self.table.go_on_from(before)

    def _settle(self, moving: Sequence[int]) -> None:
        """Copy what kept moving, and have what was recorded meanwhile recorded anew."""
        self.reasons.forget_changes()
        self._rerecording.begin()
        self._copy_instead(moving)

    def _make_room(self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]) -> bool:
        room, dropped = self.table.make_room(shape_key, static_key, args)
        self._close(dropped)
        return room

    def forget_recordings(self) -> None:
        """Drop every recording; calls of shapes known so far record at once."""
        self._close(self.table.drop_recordings())
        self._placement.forget_sizes()

    def _slot(self, shape_key: ShapeKey, static_key: StaticKey, args: Sequence[Any]) -> int | None:
        """Where to record this signature once more; see `Placement.slot`."""
        if not self.table.has_recordings(shape_key):
            self._placement.make_space(self.layout.bytes_that_move(args))
        found, module = self.table.find(shape_key, static_key), self._gathered.module(args)
        return self._placement.slot(found, module, self._rerecording)

    def _record(self, args: list[Any], slot: int, watch: Watch) -> Recording | None:
        """A recording, None if this call is none for it."""
        if not self._warm_ups.ran_here:
            self.owner.driver.prepare_thread()
        self._placement.note(self.layout.bytes_that_move(args))
        written = {*self.layout.mutated, *self.written}
        stationary: tuple[int, ...] = ()
        if not self._gathered.any:
            in_pool, stay = self.owner.is_pool_storage, not self._rerecording.results_move
            stationary = watch.stationary(args, written, in_pool, results_stay=stay)
        if stationary:
            self.stats.promotions += 1
        recording = self._recorder.record(
            args,
            self.layout,
            slot,
            uses=(self.visible, self.read),
            stationary=stationary,
            written=self.written,
        )
        if not self._is_of_use(recording, args):
            recording.close(whole_pool=False)
            return None
        recording.made_for = self._gathered.module(args)
        if not (watch.settled or self._gathered.any):
            recording.watch = watch
        if not recording.memory.is_lean or self.owns_outputs:
            self._copy_from_now_on(recording.visible)
        recording.set_private(self.copied - self.read)
        self.owner.add_recording(recording)
        self.stats.recordings += 1
        return recording

    def _is_of_use(self, recording: Recording, args: list[Any]) -> bool:
        """Whether the call that was recorded can and should be made by replaying."""
        if self.settings.check_layout:
            self.written |= recording.written
            if shares_memory(args, self.written):
                return False
        return recording.fits(args) and self._fallback.worth.is_given(self, recording, args)

    def leave_plain(self, why: str) -> None:
        """See `Candidate`."""
        self._fallback.leave_plain(why)
        if self.table.retire():
            self.owner.ask_to_start_over(patience=0)

    def _copy_from_now_on(self, positions: frozenset[int]) -> None:
        """Have more of the visible outputs copied out by whoever calls."""
        self.copied |= positions
        for recording in self.table.all():
            recording.set_private(self.copied - self.read)

    def plan_around(self, victim: Recording, blocks: Sequence[int], by: Recording) -> None:
        """Have outputs that were rescued call after call lie elsewhere.

        Gradients that are kept while forwards run get a pool of their own, if most of them are, and what stays in the
        old one is laid out anew without them; what is still held when its own partition runs again is copied out.
        """
        own = self.table.all()
        if victim not in own:
            return
        most = 2 * victim.memory.num_bytes(blocks) >= victim.memory.num_bytes()
        apart = most and self.settings.is_backward and by not in own
        if apart and self._placement.move_behind(by.slot):
            self.table.remove(victim)
            self._close([victim])
            self.owner.ask_to_start_over(patience=0)
        else:
            self._copy_from_now_on(victim.positions_on(blocks))

    def _close(self, recordings: Iterable[Recording]) -> None:
        self._last = None
        for recording in recordings:
            self.owner.close_recording(recording)

    def close(self) -> None:
        """Drop every recording; the next calls warm up again unless the owner is closed."""
        self._close(self.table.clear())
        self._placement.begin_again()
        self._gathered.begin()
        self.history.forget("recordings were freed: cgpass.reset(), or a failed capture")

    def forget_failures(self) -> None:
        """See `Member`."""
        self._fallback.forget()
        self._forget_moves()

    def _forget_moves(self) -> None:
        self._strays = Strays(self.owner)
        self._rerecording = Rerecording(self.name, self.owner)
