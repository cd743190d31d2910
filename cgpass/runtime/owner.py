"""`Owner`: what the recordings of one compiled function share, and how all of it is freed.

Note [What a replay overwrites]
    A replay writes its outputs and temporaries. They lie where the pool was free when it was recorded: on blocks of older
    recordings that were released by then (`Recording.released`), and where younger ones came to lie later. So it
    overwrites nothing if nobody holds an output of its own, of a younger recording, or on one of these blocks.

Note [Calls from several threads]
    A call may move what another thread holds out of the way of its replay, and does so while it has the interpreter.
    That other thread may just then be inside of an operator, between asking for an output's address and launching the
    kernel that reads it. So as soon as a second thread calls, what users get is copied from then on, gradients too, and
    nobody holds memory that moves; recordings made so far go, whatever waits for a backward, and leave what is held to
    its holders. Backwards do not count as calls: autograd makes them on threads of its own, and the caller waits.

Note [Models that were dropped]
    Dynamo keeps what it compiled for a model that is gone, since it serves others of its class, too. So an owner knows
    weakly which modules recorded calls had, and drops all recordings with the last of these; if it is being called just
    then, or something captured, that waits until another owner makes its first recording. Where calls of other modules
    are recorded afterwards, still more may come, as of a loss or a copy that is made for each call. They often lie where
    the last one lay, and replay: from then on recordings always wait, until `release`.
"""

import functools
import logging
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cgpass import torch_private
from cgpass.options import Options
from cgpass.runtime import changes, fast, native
from cgpass.runtime.changes import Change, new_lock, open_modes
from cgpass.runtime.driver import BoxedCallable, GraphDriver
from cgpass.runtime.writes import has_place

if TYPE_CHECKING:
    import torch

    from cgpass.runtime.inputs import Placeholder
    from cgpass.runtime.outputs import OutputMemory
    from cgpass.runtime.recording import Recording


log = logging.getLogger(__name__)


_LETTING_GO = 0.001
"""Seconds, once a backward: autograd's own thread lets go of gradients when the caller goes on already, and nothing
tells when it has; gradients that seem to be kept are given a pool of their own for good."""


class PoolState:
    """A pool, what was recorded into it, and whose outputs may be held."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.stack: list[tuple[int, OutputMemory, Recording]] = []
        """Recordings whose outputs may be held, in order of capture."""

    def youngest(self) -> int:
        """Capture index of the youngest recording with a held output, -1 if none."""
        stack = self.stack
        while stack:
            capture_index, memory, _ = stack[-1]
            if memory.any_held():
                return capture_index
            stack.pop()
        return -1


class Owner:
    """Driver (with its pools and stream), order of recordings, live outputs of a compiled function."""

    def __init__(
        self,
        driver: GraphDriver,
        options: Options | None = None,
        modules_read: "Callable[[], Sequence[torch.nn.Module]]" = list,
    ) -> None:
        """`modules_read` finds the modules of a call. See Note [Models that were dropped]."""
        options = options or Options()
        self._modules_read = modules_read
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        """Those of calls that were recorded, by identity: some that are equal are two."""
        self._is_followed = False
        """True if all were gone before as others came."""
        self.driver = driver
        self.max_pending_calls = options.max_pending_calls
        self._progress = options.progress
        self.lock = new_lock()
        self.closed = False
        self._pools = [PoolState()]
        self._captures = 0
        self._thread: int | None = None
        self.copies_results = options.outputs == "owned"
        """True if users own what they get, always once calls came from several threads: who hands it out copies it."""
        self.plain = False
        """True if all calls are to run without a graph, to be compared with those that replay."""
        self.bypassed: str | None = None
        """Cause for running this call without a graph, if any: "asked", "transform" (whose tensors need have no memory),
        "no_native_code"."""
        self.changes: list[Change] = []
        """Under way or broken off. See Note [Changes that are broken off]."""
        self._members: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """See `add`."""
        self.placeholders: weakref.WeakValueDictionary[tuple[Any, ...], Placeholder] = (
            weakref.WeakValueDictionary()
        )
        """Memory of copied inputs, kept alive by the recordings that read it. See Note [Placeholders are shared]."""
        self._pool_addresses: Counter[int] = Counter()
        self.plain_results: weakref.WeakKeyDictionary[torch.UntypedStorage, bool] = (
            weakref.WeakKeyDictionary()
        )
        """Storages of what captured partitions returned in calls without a graph; True if these were warm-ups."""
        _owners[self] = None

    def enter_call(self, *, is_backward: bool = False) -> None:
        """Begin a call of the compiled function, with `lock` held. Autograd makes backwards on a thread of its own."""
        self.bypassed = None
        if self.plain:
            self.bypassed = "asked"
        elif not (fast.is_loaded or native.loader.wait(self._progress)):
            self.bypassed = "no_native_code"
        elif fast.in_transform() or torch_private.in_forward_ad():
            self.bypassed = "transform"
        if self.changes or open_modes:
            self.mend()
        self.driver.enter_call()
        if is_backward:
            return
        thread = threading.get_ident()
        if thread != self._thread:
            if self._thread is not None and not self.copies_results:
                log.info("several threads call the function: results are copied from now on")
                self.copies_results = True
                self._drop_all()
            self._thread = thread

    def mend(self) -> None:
        """Undo what an earlier call left half done. See Note [Changes that are broken off]."""
        changes.mend(open_modes)
        changes.mend(self.changes)

    # ---- replays

    def is_safe(self, recording: "Recording") -> bool:
        """Tell whether a replay overwrites nothing that is held. See Note [What a replay overwrites]."""
        pool = self._pools[recording.pool_index]
        if pool.youngest() >= recording.capture_index:
            return False
        released = recording.released
        return not released or not fast.any_held_among(pool.stack, released)

    def overwritten_by(self, recording: "Recording") -> "list[tuple[Recording, list[int]]]":
        """Recordings with held outputs that a replay would overwrite, and which blocks of each."""
        found: list[tuple[Recording, list[int]]] = []
        for index, memory, other in self._pools[recording.pool_index].stack:
            among = recording.released.get(index, ()) if index < recording.capture_index else None
            blocks = memory.held(among)
            if blocks:
                found.append((other, blocks))
        return found

    def note_handed_out(self, recording: "Recording") -> None:
        """Note that a recording hands out its outputs, which is younger than all whose outputs are held."""
        stack = self._pools[recording.pool_index].stack
        while stack and stack[-1][0] >= recording.capture_index:  # what was held there was moved
            stack.pop()
        stack.append((recording.capture_index, recording.memory, recording))

    def rescue(self, recording: "Recording") -> bool:
        """Move what a replay would overwrite; returns whether all of it could be."""
        victims = self.overwritten_by(recording)
        if not all(victim.memory.can_rescue(blocks) for victim, blocks in victims):
            return False
        if any(victim.backward not in (None, recording.backward) for victim, _ in victims):
            time.sleep(_LETTING_GO)
            victims = self.overwritten_by(recording)
        with self.changing():
            for victim, blocks in victims:
                if victim.closed:  # with another one of its backward: its outputs were moved
                    continue
                victim.rescue(blocks)
                if victim.backward is not None and victim.backward is not recording.backward:
                    victim.backward.move_apart(recording)
        return True

    # ---- recordings

    def pool_for(self, number: int, *, first: int = 0) -> int | None:
        """Return the index of a recording's pool, not before `first`; None if too much is held.

        `number` recordings for the same memory have all of their results held: each has a pool of its own, which it shares
        with those of other partitions and layers that have as many.
        """
        wanted = first + number
        if number >= self.max_pending_calls:
            return None
        while len(self._pools) <= wanted:
            self._pools.append(PoolState())
        lost = [(r, r.memory.held(r.memory.released())) for r in self._pools[wanted].recordings]
        if all(recording.memory.can_rescue(blocks) for recording, blocks in lost):
            with self.changing():
                for recording, blocks in lost:  # a capture could lie there
                    recording.rescue(blocks)
            return wanted
        for other, pool in enumerate(self._pools[first:], first):
            if pool.youngest() < 0:
                return other
        return self.new_pool() if len(self._pools) < self.max_pending_calls + first else None

    def new_pool(self) -> int:
        """Return the index of a pool whose memory no other recording shares: of an empty one, if there is one."""
        for number, pool in enumerate(self._pools[1:], 1):
            if not pool.recordings and pool.youngest() < 0:
                return number
        self._pools.append(PoolState())
        return len(self._pools) - 1

    def begin_recording(self, pool_index: int) -> dict[int, tuple[int, ...]]:
        """Give memory that nobody holds back to the pool; returns `Recording.released` of the new recording.

        The first one has other owners do what waits for it: see Note [Models that were dropped].
        """
        if not self._captures:
            for owner in _all_owners():
                owner.release_if_dropped()
        recordings = self._pools[pool_index].recordings
        for recording in recordings:
            recording.memory.release_unheld()
        return {r.capture_index: found for r in recordings if (found := r.memory.released())}

    def block_at(self, pool_index: int, address: int) -> "tuple[Recording, int, int] | None":
        """The recording that keeps the block at an address, the block's number and its own references to it."""
        for recording in self._pools[pool_index].recordings:
            found = recording.memory.num_users(address)
            if found is not None:
                return recording, *found
        return None

    def has_recordings(self) -> bool:
        """Tell whether anything is recorded in the first pool."""
        return bool(self._pools[0].recordings)

    def warm_up(self, fn: BoxedCallable, args: list[Any]) -> Sequence[Any]:
        """Run `fn(args)`, with memory of the first pool if nothing was recorded there yet. See `GraphDriver.warm_up`."""
        return fn(args) if self.has_recordings() else self.driver.warm_up(fn, args)

    def make_space(self) -> None:
        """Drop every recording before a larger one is made, unless something has to stay where it lies.

        Smaller ones find room in the memory of a larger one when they are made again, it finds none in theirs.
        """
        if all(r.memory.can_rescue(r.memory.held()) for r in self._recordings()):
            self._drop_all()

    def _recordings(self) -> "list[Recording]":
        return [recording for pool in self._pools for recording in pool.recordings]

    def _drop_all(self) -> None:
        """Drop every recording; who holds outputs keeps them, and a backward that reads some runs without its own."""
        self.start_anew()
        self.driver.give_back()

    def _have_all_go(self, frees: Iterable[Callable[[], None]]) -> None:
        with self.changing():
            for recording in self._recordings():
                recording.close()
            for free in frees:
                free()
            self._pools = [PoolState()]
            self._pool_addresses.clear()

    def changing(self) -> Change:
        """A block that changes what is recorded; where it raises, the next call starts again."""
        return _Changing(self)

    def start_anew(self) -> None:
        """Drop every recording, in whatever state it is; calls of keys that are known record again."""
        self._have_all_go([forget for _, forget in self._members])

    def add_recording(self, recording: "Recording") -> None:
        """Note a recording as the youngest, and where its outputs lie. See Note [Graphs and process groups]."""
        if torch_private.has_process_groups():
            torch_private.before_process_groups_end(release_all, release_idle)
        self._captures += 1
        recording.capture_index = self._captures
        self._pools[recording.pool_index].recordings.append(recording)
        self._pool_addresses.update(recording.memory.addresses())

    def close_recording(self, recording: "Recording") -> None:
        """Free a recording; outputs that somebody holds stay theirs."""
        if not recording.closed:
            recording.close(whole_pool=False)
        pool = self._pools[recording.pool_index]
        pool.recordings = [other for other in pool.recordings if other is not recording]
        pool.stack = [entry for entry in pool.stack if entry[2] is not recording]
        self._pool_addresses -= Counter(recording.memory.addresses())

    def is_pool_storage(self, tensor: "torch.Tensor") -> bool:
        """Tell whether `tensor` lies in the output of a recording."""
        return self._pool_addresses[tensor.untyped_storage().data_ptr()] > 0

    def makers(self, values: "Iterable[torch.Tensor]") -> "list[Recording]":
        """Return the recordings in whose outputs values lie."""
        storages = {value.untyped_storage()._cdata for value in values}
        return [
            recording
            for recording in self._recordings()
            if any(each._cdata in storages for each in recording.memory.watch[0])
        ]

    def note_plain_results(self, outputs: Iterable[Any], *, is_warm_up: bool = False) -> None:
        """Note the results of a captured partition without a graph: its readers in this call run without one, too."""
        for value in outputs:
            if has_place(value):
                self.plain_results[value.untyped_storage()] = is_warm_up

    def made_in_warm_ups(self, values: "Iterable[torch.Tensor]") -> bool:
        """Tell whether no partition that made some of these values without a graph goes on to run without one."""
        return all(self.plain_results.get(value.untyped_storage(), True) for value in values)

    # ---- end

    def note_modules(self) -> None:
        """Note the modules of a call that is recorded. See Note [Models that were dropped]."""
        if read := self._modules_read():
            gone = functools.partial(_note_gone, weakref.ref(self))
            alive = {n: module for n, module in self._modules.items() if module() is not None}
            self._is_followed |= bool(self._modules) and not alive
            self._modules = alive | {id(each): weakref.ref(each, gone) for each in read}

    def release_if_dropped(self) -> None:
        """See Note [Models that were dropped]."""
        modules = self._modules.values()
        if not modules or any(module() is not None for module in modules):
            return
        if self.driver.is_capturing() or self.lock._is_owned() or not self._recordings():
            return
        if self.lock.acquire(blocking=False):
            try:
                with torch_private.without_modes():  # in the middle of a trace, it may be
                    self.driver.enter_call()  # what is held is copied behind the call that made it
                    self._drop_all()
            finally:
                self.lock.release()

    def add(self, close: Callable[[], None], forget: Callable[[], None]) -> None:
        """Have what makes recordings close with this owner; `forget` drops recordings, but not what is known of calls."""
        self._members.append((close, forget))

    def release(self) -> None:
        """Free every recording. Calls made afterwards warm up and record again, whatever failed or was used up before."""
        with self.lock:
            self._modules, self._is_followed = {}, False
            self.driver.enter_call()
            self._have_all_go([close for close, _ in self._members])
            self.driver.end_warm_ups()

    def close(self) -> None:
        """Free every recording. Calls made afterwards run without a graph."""
        self.closed = True
        self.release()
        self._members.clear()  # which hold it in turn: what nobody else holds is gone at once

    def __del__(self) -> None:
        """Outputs that outlive the compiled function lie in its pools: they are moved before those go."""
        if sys.is_finalizing():
            return
        with torch_private.without_modes():  # garbage may be collected in the middle of a trace
            try:
                self.close()
            except BaseException:  # of a signal's handler, and nobody gets it
                self.close()


class _Changing(Change):
    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.changes)
        self._owner = weakref.proxy(owner)

    def undo(self) -> None:
        self._owner.start_anew()


def _all_owners() -> list[Owner]:
    """Those that live; other threads may make some meanwhile."""
    return [owner for known in _owners.keyrefs() if (owner := known()) is not None]


def _note_gone(
    owner: "weakref.ref[Owner]",
    _: "weakref.ref[torch.nn.Module]",
    is_finalizing: Callable[[], bool] = sys.is_finalizing,  # the module's names may be gone by then
) -> None:
    """A module of recorded calls is gone. See Note [Models that were dropped]."""
    known = None if is_finalizing() else owner()
    if known is not None and not known._is_followed:
        known.release_if_dropped()


_owners: "weakref.WeakKeyDictionary[Owner, None]" = weakref.WeakKeyDictionary()
"""Owners are kept alive by the compiled functions that use them."""


def release_all() -> None:
    """Free every recording of this process."""
    for owner in _all_owners():
        owner.release()


def release_idle() -> None:
    """The same without waiting: what another thread's call has is freed when the next one begins.

    That call may be what is to be aborted, or wait for a lock that the caller has (Dynamo's own in its `reset`).
    """
    for owner in _all_owners():
        if owner.lock.acquire(blocking=False):
            try:
                owner.release()
            finally:
                owner.lock.release()
        else:
            owner.changes.append(owner.changing())
