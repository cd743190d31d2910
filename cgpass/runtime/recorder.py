"""`Recorder`: makes the recordings of one partition.

Note [Placeholders are shared]
    What a recording copies in is read by the replay that follows, and by nothing after that but what is written back to
    the caller's own. Replays of one owner come one after the other, on whatever stream. So all of its recordings may
    copy inputs of the same layout to the same memory, if each has a place of its own for each of its inputs: a model
    whose gradients come from many eager partitions needs memory for those of one.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import StagingError
from cgpass.runtime import fast
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.owner import Owner
from cgpass.runtime.placeholders import Placeholder
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import Layout, layout_of, place_of
from cgpass.runtime.syncs import syncs_noted
from cgpass.runtime.writes import (
    Changes,
    SaidToBeWritten,
    Watched,
    counting,
    has_place,
)
from cgpass.telemetry import CallStats


class Gifts:
    """Blocks of earlier recordings that nobody but this call's inputs holds, handed over for one capture.

    The callable drops them where it needs them no longer, and later temporaries and outputs lie on them: saved tensors
    die inside the backward. A replay therefore overwrites them, and asks `Recording.may_replay` first.
    """

    def __init__(self, owner: Owner, slot: int, args: Sequence[Any], pooled: Sequence[int]) -> None:
        self._args = args
        groups: dict[int, list[int]] = {}
        for i in pooled:
            groups.setdefault(args[i].untyped_storage().data_ptr(), []).append(i)
        self._given: list[tuple[Recording, int, list[int], int]] = []
        for address, positions in groups.items():
            found = owner.block_at(slot, address)
            if found is None:
                continue
            recording, number, references = found
            users = references + len(positions)
            if fast.exclusive(args, positions, [users] * len(positions)):
                self._given.append((recording, number, positions, users))
        self._lent: list[torch_private.WeakStorage] = []

    def put_into(self, inputs: list[Any]) -> None:
        """Replace inputs by tensors that own their memory."""
        for recording, number, positions, _ in self._given:
            storage = recording.memory.give(number)
            self._lent.append(torch_private.WeakStorage(storage))
            for i in positions:
                inputs[i] = torch_private.on_storage(storage, self._args[i])

    def take_back(self) -> dict[int, int]:
        """Return what did not die; tells the inputs that did, and how many users their storages may have."""
        consumed: dict[int, int] = {}
        for (recording, number, positions, users), weak in zip(
            self._given, self._lent, strict=False
        ):
            storage = weak.get()
            if storage is None:
                consumed.update(dict.fromkeys(positions, users))
            else:
                recording.memory.take_back(number, storage)
        return consumed


class WarmUp:
    """Runs a partition plainly, and notes whether it syncs and what it writes."""

    def __init__(self, fn: BoxedCallable, owner: Owner) -> None:
        self._fn = fn
        self._owner = owner
        self._here = threading.local()
        self._extra = 3
        """How many threads may yet run a call after a capture of theirs failed."""
        self.found_syncs = False
        """Whether the last call that was checked seemed to wait for the device."""
        self.last_ms: float | None = None
        """Host time of the last call."""
        self.found_written: frozenset[int] = frozenset()
        """Inputs whose bits the last call changed, among those compared."""

    @property
    def ran_here(self) -> bool:
        """Whether this thread ran a call."""
        return getattr(self._here, "ran", False)

    def first_here(self) -> bool:
        """Whether what failed may succeed once this thread ran a call: libraries keep handles for each thread."""
        if self.ran_here or not self._extra:
            return False
        self._extra -= 1
        return True

    def run(
        self, args: list[Any], *, check_syncs: bool = False, compared: Sequence[int] = ()
    ) -> Sequence[Any]:
        """Run one call. Finding out what it waits for, or whether it changed `compared` inputs, may wait for the device."""
        self._here.ran = True
        driver, changes, start = self._owner.driver, Changes(args, compared), time.perf_counter()
        noted = syncs_noted(driver.device) if check_syncs else contextlib.nullcontext(())
        with noted as found, torch_private.autocast_cache_off():
            if self._owner.has_recordings():
                outputs = self._fn(args)
            else:
                outputs = driver.warm_up(self._fn, args)
        self.last_ms = (time.perf_counter() - start) * 1e3
        self.found_syncs, self.found_written = bool(found), changes.found()
        return outputs


class Recorder:
    """Stages inputs, has the driver record, and takes over what it returns."""

    def __init__(
        self,
        fn: BoxedCallable,
        owner: Owner,
        *,
        opaque: bool,
        finds_writes: bool,
        stats: CallStats,
    ) -> None:
        self._fn = fn
        self._owner = owner
        self.opaque = opaque
        self._finds_writes = finds_writes
        self._stats = stats

    def record(
        self,
        args: list[Any],
        layout: Layout,
        slot: int,
        *,
        uses: tuple[frozenset[int] | None, frozenset[int]],
        copied: Collection[int] = (),
        written: Collection[int] = (),
    ) -> Recording:
        """Record one signature; nobody but `args` may hold inputs that are to die inside.

        `uses` are the outputs that the user gets (None: all), and those that others read. `written` are inputs that plain
        calls wrote, besides those that the layout knows. Raises `CaptureError` where the callable gives an input another
        shape, and `StagingError` where no placeholder can stand for one.
        """
        owner = self._owner
        released = owner.begin_recording(slot)
        pooled = [i for i in layout.pooled if i not in copied]
        gifts = Gifts(owner, slot, args, pooled)
        placeholders = self._placeholders(args, layout, sorted({*layout.copied, *copied}))
        staged = [placeholders[i].tensor if i in placeholders else a for i, a in enumerate(args)]
        if self._finds_writes:
            staged = [counting(value) for value in staged]
        passed = staged.copy()
        gifts.put_into(passed)
        watched = staged if self._finds_writes else ()
        before, said = Watched(watched), SaidToBeWritten(watched)
        try:
            fn = self._watched_by(said) if self._finds_writes else self._fn
            with torch_private.autocast_cache_off():
                graph, outputs = owner.driver.record(fn, passed, opaque=self.opaque, slot=slot)
        finally:
            passed.clear()
            consumes = gifts.take_back()
        before.refuse_new_layouts()
        visible, read = uses
        recording = Recording(
            graph,
            outputs,
            staged,
            placeholders,
            mutated=sorted({*layout.mutated, *written, *before.written(), *said.found}),
            visible=visible,
            read=read,
            consumes=consumes,
            outside=self._outside(said, outputs, slot) if self._finds_writes else None,
            released=released,
            counts_writes=self._finds_writes,
            birth=owner.next_birth(),
            slot=slot,
            stats=self._stats,
        )
        del outputs
        recording.seal()
        return recording

    def _watched_by(self, said: SaidToBeWritten) -> BoxedCallable:
        def fn(args: list[Any]) -> Sequence[Any]:
            # Inside of the driver's own watching: what it sees lies where the graph has it.
            with said:
                return self._fn(args)

        return fn

    def _outside(
        self, said: SaidToBeWritten, outputs: Sequence[Any], slot: int
    ) -> dict[int, torch.UntypedStorage]:
        """What the callable read or returned that is neither an input nor made by it, by address."""
        owner = self._owner
        found = dict(said.outside)
        found.update(
            (value.untyped_storage().data_ptr(), value.untyped_storage())
            for value in outputs
            if said.is_unknown(value) or (has_place(value) and value.device != owner.driver.device)
        )
        if found:  # of these, the driver knows what was made beside operators
            made = owner.driver.live_blocks(slot)
            for address in found.keys() & made:
                if owner.block_at(slot, address) is None:
                    del found[address]
        return found

    def _placeholders(
        self, args: Sequence[Any], layout: Layout, copied: Sequence[int]
    ) -> dict[int, Placeholder]:
        """Copies of inputs. See Note [Placeholders are shared]."""
        numbers: Counter[tuple[Any, ...]] = Counter()
        found: dict[int, Placeholder] = {}
        for i in copied:
            value, info = args[i], layout.infos[i]
            like = layout_of(value)
            key = (numbers[like], *like, *(place_of(value) if info.whole_storage else ()))
            numbers[like] += 1
            try:
                found[i] = self._placeholder(key, value, whole_storage=info.whole_storage)
                found[i].copy_from(value)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # ours: nothing of the user's ran
                raise StagingError(
                    f"{info.name} can't be given memory of fixed address ({type(error).__name__}: {error})"
                ) from error
        return found

    def _placeholder(
        self, key: tuple[Any, ...], value: torch.Tensor, *, whole_storage: bool
    ) -> Placeholder:
        known = self._owner.placeholders
        found = known.get(key)
        if found is None:
            found = known[key] = Placeholder(value, whole_storage=whole_storage)
        return found
