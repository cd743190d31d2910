"""`Recording`: one captured graph with its inputs and outputs. `Recorder` makes those of one partition.

Note [Placeholders are shared]
    What a recording copies in is read by the replay that follows, and by nothing after that but what is written back to
    the caller's own. Replays of one owner come one after the other, on whatever stream. So all of its recordings may
    copy inputs of the same layout to the same memory, if each has a place of its own for each of its inputs: a model
    whose gradients come from many eager partitions needs memory for those of one.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.errors import StagingError
from cgpass.runtime import fast
from cgpass.runtime.driver import BoxedCallable, CapturedGraph
from cgpass.runtime.inputs import Layout, Placeholder, copies_in, layout_of, num_bytes, place_of
from cgpass.runtime.outputs import InputAlias, OutputMemory, alias_of_input
from cgpass.runtime.owner import Owner
from cgpass.runtime.writes import SaidToBeWritten, Watched, counting, has_place
from cgpass.telemetry import CallStats

if TYPE_CHECKING:
    from cgpass.runtime.partition import PartitionRunner


class Recording:
    """One captured graph: where its inputs must lie, and what it hands out.

    Whoever calls `run` checks before that a call's inputs match.
    """

    backward: "PartitionRunner | None" = None
    """What made it, if its gradients can have a pool that forwards don't write. See `Owner.rescue`."""
    made_for: tuple[int, ...] = ()
    """Identities of the storages that it reads in place: of layers whose parameters come to one place in turn, one's."""

    def __init__(
        self,
        graph: CapturedGraph,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        placeholders: Mapping[int, Placeholder],
        *,
        mutated: Sequence[int] = (),
        visible: frozenset[int] | None = None,
        read: frozenset[int] = frozenset(),
        consumes: Mapping[int, int] | None = None,
        outside: Mapping[int, torch.UntypedStorage] | None = None,
        released: dict[int, tuple[int, ...]] | None = None,
        counts_writes: bool = False,
        birth: int = 0,
        slot: int = 0,
        stats: CallStats | None = None,
    ) -> None:
        self.closed = False
        """True if it is never to be replayed: it was freed, or its outputs are being moved right now."""
        self._stats = stats or CallStats()
        self.birth = birth
        self.slot = slot
        self.released = released or {}
        """Blocks that were free when it was made, by the birth of the recording whose outputs lay there."""
        self.written = frozenset(mutated)
        """Inputs that a replay writes, or that are written from the memory that it writes."""
        self.draws: list[int] = []
        """See `table.Seen.draws`."""
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay
        self.instantiate_ms = graph.instantiate_ms
        """See `CapturedGraph`."""
        consumes = consumes or {}
        self._consumed, self._users = tuple(consumes), tuple(consumes.values())
        """Inputs whose memory it writes, and the number of users of a storage that nobody else holds."""
        self._outside = outside or {}
        """What it reads or returns that is neither an input nor made by it, by address: kept alive here."""
        self._placeholders = dict(placeholders)  # kept alive as long as a recording reads them
        self._copies = copies_in(placeholders)
        self._counts_writes = counts_writes
        """True if autograd is to know of every write, since nobody else tells it."""
        self._write_back = [(i, placeholders[i]) for i in mutated if i in placeholders]
        self.copied_inputs = {
            i: num_bytes(p.target) * (1 + (i in self.written)) for i, p in placeholders.items()
        }
        """Bytes that each replay copies, by position of the input; those that it writes are copied back, too."""
        self.copied_bytes = sum(self.copied_inputs.values())
        self.own: dict[int, int] = {}
        """Which of the memory's tensors an output is, by position."""
        self._outputs = list(outputs)
        self._take_over(outputs, staged, visible, read)
        del outputs
        self._sort_aliases(staged)

    def _take_over(
        self,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        visible: frozenset[int] | None,
        read: frozenset[int],
    ) -> None:
        """Sort outputs: views of inputs, what lies elsewhere, and tensors of the recording's own, each once."""
        by_storage = {
            value.untyped_storage().data_ptr(): i
            for i, value in reversed(list(enumerate(staged)))
            if isinstance(value, torch.Tensor)
            and i not in self._consumed
            and value.untyped_storage().nbytes()
        }
        own: list[torch.Tensor] = []
        numbers: dict[int, int] = {}
        for n, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            alias = alias_of_input(output, staged, by_storage)
            if alias is not None:
                self._outputs[n] = alias
                continue
            if output.untyped_storage().data_ptr() in self._outside:
                continue  # handed out as that very tensor: no replay writes where it lies
            if id(output) not in numbers:
                numbers[id(output)] = len(own)
                own.append(output)
            self.own[n] = numbers[id(output)]
            self._outputs[n] = None
        self._own_at, self._take_own = tuple(self.own), fast.taker(tuple(self.own.values()))
        shown = {number for n, number in self.own.items() if visible is None or n in visible}
        used = {number for n, number in self.own.items() if n in read}
        uses = [(n in shown, n in used) for n in range(len(own))]
        self.memory = OutputMemory(own, uses, share=self._graph.share)

    def _sort_aliases(self, staged: Sequence[Any]) -> None:
        """Tell outputs that are plain views of inputs from other aliases of them."""
        aliases = [(n, a) for n, a in enumerate(self._outputs) if isinstance(a, InputAlias)]
        self.aliases = frozenset(n for n, _ in aliases)
        """Outputs that are (views of) inputs."""
        self.viewed = frozenset(a.index for _, a in aliases if not a.identity)
        """Inputs that outputs are views of; such outputs are laid out as if the inputs were as they were."""
        same = {n: a.index for n, a in aliases if a.identity}
        self._same_at, self._same_of = tuple(same), fast.taker(tuple(same.values()))
        views = {n: spec for n, a in aliases if (spec := a.view_of(staged[a.index])) is not None}
        self._views_at, self._views = tuple(views), tuple(views.values())
        self._other_aliases = [(n, a) for n, a in aliases if n not in same and n not in views]

    def seal(self) -> None:
        """Note that nobody but this recording holds its outputs; to be called once, last of all."""
        self.memory.seal()

    def may_replay(self, args: Sequence[Any]) -> bool:
        """Tell whether a replay writes no inputs that somebody else holds."""
        if self.closed:
            return False
        return not self._consumed or fast.exclusive(args, self._consumed, self._users)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Copy in what moves, replay, and hand out the outputs.

        **Lifetime:** tensors returned are fresh aliases of pool memory: the next replay of this recording writes
        over them, unless `LiveOutputs` is asked first.
        """
        for group in self._copies:
            group.copy_from(args)
        self.replay()
        for i, placeholder in self._write_back:
            # A compiled function itself counts those writes that autograd is to know of.
            placeholder.copy_to(args[i].data)
            if self._counts_writes and not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        outputs = self._outputs.copy()
        fast.put(outputs, self._own_at, self._take_own(self.memory.aliases()))
        fast.put(outputs, self._views_at, fast.views(args, self._views))
        fast.put(outputs, self._same_at, self._same_of(args))
        for n, alias in self._other_aliases:
            outputs[n] = alias.of(args[alias.index])
        return outputs

    def copy_out(self, results: list[Any]) -> int:
        """Put copies of its own outputs in their place, for the caller to keep; returns bytes copied."""
        return fast.copy_out(results, self._own_at)

    # ---- what is held

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move held outputs to memory of their own; returns bytes copied. Where that fails it is never replayed again."""
        closed, self.closed = self.closed, True
        copied = self.memory.rescue(blocks)
        self.closed = closed
        self._stats.rescues += copied > 0
        self._stats.rescued_bytes += copied
        return copied

    def close(self, *, whole_pool: bool = True) -> None:
        """Free the graph; outputs that somebody holds stay theirs. See `OutputMemory.let_go`."""
        self.closed = True
        self.memory.let_go(whole_pool=whole_pool)
        self._graph.reset()


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
        for given, weak in zip(self._given, self._lent, strict=False):
            recording, number, positions, users = given
            storage = weak.get()
            if storage is None:
                consumed.update(dict.fromkeys(positions, users))
            else:
                recording.memory.take_back(number, storage)
        return consumed


@dataclass(frozen=True)
class Recorder:
    """Stages inputs, has the driver record, and takes over what it returns."""

    fn: BoxedCallable
    layout: Layout
    owner: Owner
    opaque: bool
    finds_writes: bool
    """Set to look for inputs that are written, since nobody tells."""
    stats: CallStats
    shares_inputs: bool = True
    """False if it copies inputs to memory that no other recording copies to."""

    def record(
        self,
        args: list[Any],
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
        owner, layout = self.owner, self.layout
        released = owner.begin_recording(slot)
        gifts = Gifts(owner, slot, args, [i for i in layout.pooled if i not in copied])
        placeholders = self._placeholders(args, sorted({*layout.copied, *copied}))
        staged = [placeholders[i].tensor if i in placeholders else a for i, a in enumerate(args)]
        if self.finds_writes:
            staged = [counting(value) for value in staged]
        passed = staged.copy()
        gifts.put_into(passed)
        watched = staged if self.finds_writes else ()
        before, said = Watched(watched), SaidToBeWritten(watched)

        def fn(args: list[Any]) -> Sequence[Any]:
            # Inside of the driver's own watching: what it sees lies where the graph has it.
            with said:
                return self.fn(args)

        if not self.finds_writes:
            fn = self.fn
        try:
            with torch_private.autocast_cache_off():
                graph, outputs = owner.driver.record(fn, passed, opaque=self.opaque, slot=slot)
        finally:
            passed.clear()
            consumes = gifts.take_back()
        before.refuse_new_layouts()
        recording = Recording(
            graph,
            outputs,
            staged,
            placeholders,
            mutated=sorted({*layout.mutated, *written, *before.written(), *said.found}),
            visible=uses[0],
            read=uses[1],
            consumes=consumes,
            outside=self._outside(said, outputs, slot) if self.finds_writes else None,
            released=released,
            counts_writes=self.finds_writes,
            birth=owner.next_birth(),
            slot=slot,
            stats=self.stats,
        )
        del outputs
        recording.seal()
        return recording

    def _outside(
        self, said: SaidToBeWritten, outputs: Sequence[Any], slot: int
    ) -> dict[int, torch.UntypedStorage]:
        """Return what the callable read or returned that is neither an input nor made by it, by address."""
        owner = self.owner
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

    def _placeholders(self, args: Sequence[Any], copied: Sequence[int]) -> dict[int, Placeholder]:
        """Copies of inputs. See Note [Placeholders are shared]."""
        numbers: Counter[tuple[Any, ...]] = Counter()
        known, found = self.owner.placeholders, dict[int, Placeholder]()
        for i in copied:
            value, info = args[i], self.layout.infos[i]
            like, whole = layout_of(value), info.whole_storage
            key = (numbers[like], *like, *(place_of(value) if whole else ()))
            numbers[like] += 1
            try:
                same = known.get(key) if self.shares_inputs else None
                found[i] = same or Placeholder(value, whole_storage=whole)
                if self.shares_inputs:
                    known[key] = found[i]
                found[i].copy_from(value)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # ours: nothing of the user's ran
                raise StagingError(
                    f"{info.name} can't be given memory of fixed address ({type(error).__name__}: {error})"
                ) from error
        return found
