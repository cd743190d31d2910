"""`Recorder`: makes the recordings of one partition.

Note [Placeholders are shared]
    What a recording copies in is read by the replay that follows, and by nothing after that but what is written back to
    the caller's own. Replays of one owner come one after the other, on whatever stream. So all of its recordings may
    copy inputs of the same layout to the same memory, if each has a place of its own for each of its inputs: a model
    whose gradients come from many eager partitions needs memory for those of one.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from cgpass import _torch
from cgpass.errors import StagingError
from cgpass.inputs import InputInfo
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import thrown_into
from cgpass.runtime.gifts import Gifts
from cgpass.runtime.owner import Owner
from cgpass.runtime.placeholders import Placeholder
from cgpass.runtime.recording import Recording
from cgpass.runtime.signature import Layout, layout_of, place_of
from cgpass.runtime.writes import (
    SaidToBeWritten,
    Writes,
    counting,
    has_place,
    places,
    refuse_new_layouts,
)
from cgpass.telemetry import CallStats


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
        """Keep what every recording needs.

        Args:
            fn: What is recorded.
            owner: Driver, pools, order of recordings.
            opaque: Whether the callable's kernels bypass aten.
            finds_writes: Whether nobody says which inputs are written.
            stats: Where recordings count their rescues.
        """
        self._fn = fn
        self._owner = owner
        self._opaque = opaque
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
        """Record one signature.

        Args:
            args: A call's inputs; nobody but this list may hold those that are to die inside.
            layout: What they are.
            slot: Pool to record into.
            uses: Outputs that the user gets (None: all), and outputs that others read.
            copied: Static inputs, and values of other recordings, that are copied in this call.
            written: Inputs that plain calls wrote, besides those that the layout knows.

        Raises:
            CaptureError: The callable gives an input another shape; looked for where it finds writes.
            StagingError: A copied input is of a kind that no placeholder can stand for.
        """
        owner = self._owner
        released = owner.begin_recording(slot)
        pooled = [i for i in layout.pooled if i not in copied]
        gifts = Gifts(owner, slot, args, pooled)
        placeholders = self._placeholders(args, layout, sorted({*layout.copied, *copied}))
        staged = [placeholders[i].tensor if i in placeholders else a for i, a in enumerate(args)]
        if self._finds_writes:
            staged = [counting(value) for value in staged]
        for i, placeholder in placeholders.items():
            with _staging(layout.infos[i]):
                placeholder.copy_from(args[i])
        passed = staged.copy()
        gifts.put_into(passed)
        watched = staged if self._finds_writes else ()
        writes, before, said = Writes(watched), places(watched), SaidToBeWritten(watched)
        try:
            fn = self._watched_by(said) if self._finds_writes else self._fn
            with _torch.autocast_cache_off():
                graph, outputs = owner.driver.record(fn, passed, opaque=self._opaque, slot=slot)
        finally:
            passed.clear()
            consumes = gifts.take_back()
        refuse_new_layouts(watched, before)
        visible, read = uses
        recording = Recording(
            graph,
            outputs,
            staged,
            placeholders,
            mutated=sorted({*layout.mutated, *written, *writes.found(), *said.found}),
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
        """See Note [Placeholders are shared]."""
        numbers: Counter[tuple[Any, ...]] = Counter()
        found: dict[int, Placeholder] = {}
        for i in copied:
            like = layout_of(args[i])
            found[i] = self._placeholder(numbers[like], args[i], layout.infos[i])
            numbers[like] += 1
        return found

    def _placeholder(self, number: int, value: torch.Tensor, info: InputInfo) -> Placeholder:
        """Number `number` of those laid out as `value`."""
        whole, known = info.whole_storage, self._owner.placeholders
        key = (number, *layout_of(value), *(place_of(value) if whole else ()))
        found = known.get(key)
        if found is None:
            with _staging(info):
                found = known[key] = Placeholder(value, whole_storage=whole)
        return found


@contextlib.contextmanager
def _staging(info: InputInfo) -> Iterator[None]:
    """Tell errors of ours from those of what is recorded: nothing of the user's runs inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise StagingError(
            f"{info.name} can't be given memory of fixed address ({type(error).__name__}: {error})"
        ) from thrown_into(error)
