"""`Recording`: one captured graph with its inputs and outputs. `Recorder` makes those of one partition.

Note [Placeholders are shared]
    What a recording copies in is read by the replay that follows, and by nothing after that but what is written back to
    the caller's own. Replays of one owner come one after the other, on whatever stream. So all of its recordings may
    copy inputs of the same layout to the same memory, if each has a place of its own for each of its inputs: a model
    whose gradients come from many eager partitions needs memory for those of one.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.driver import BoxedCallable, CapturedGraph
from cgpass.runtime.inputs import (
    Layout,
    Placeholder,
    copies_in,
    copy_in,
    layout_of,
    place_of,
)
from cgpass.runtime.outputs import InputAlias, OutputMemory, Uses, alias_of_input
from cgpass.runtime.owner import Owner
from cgpass.runtime.writes import Watched, counting, has_place
from cgpass.telemetry import CallStats

if TYPE_CHECKING:
    import weakref

    from cgpass.runtime.partition import PartitionRunner


@dataclass(eq=False, repr=False)
class Recording:
    """One captured graph: where its inputs must lie, and what it hands out.

    The caller of `run` checks before that a call's inputs match.
    """

    graph: CapturedGraph
    outputs: InitVar[Sequence[Any]]
    staged: InitVar[Sequence[Any]]
    """Inputs as they were recorded."""
    placeholders: Mapping[int, Placeholder]
    """Stand-ins for some of them; kept alive as long as a recording reads them."""
    written: frozenset[int] = frozenset()
    """Inputs that a replay writes, or that are written from the memory that it writes."""
    uses: InitVar[Uses | None] = None
    consumes: Mapping[int, int] = field(default_factory=dict)
    """Inputs whose memory it writes, and the number of users of a storage that nobody else holds."""
    outside: Mapping[int, torch.UntypedStorage] = field(default_factory=dict)
    """Storages that it reads or returns and that are neither an input's nor made by it, by address: kept alive here."""
    written_outside: frozenset[int] = frozenset()
    """Addresses of those that it writes."""
    released: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that were free when it was made, by the capture index of the recording whose outputs lay there."""
    counted: frozenset[int] = frozenset()
    """Those whose version counters a replay advances for autograd, since nobody else does."""
    pool_index: int = 0
    stats: CallStats = field(default_factory=CallStats)

    capture_index: int = field(default=0, init=False)
    """Its position in the order of its owner's recordings."""
    backward: "PartitionRunner | None" = field(default=None, init=False)
    """Its maker, if its gradients can have a pool that forwards don't write. See `Owner.rescue`."""
    made_for: tuple[int, ...] = field(default=(), init=False)
    """Identities of the storages that it reads in place: of layers whose parameters come to one place in turn, one's."""
    makers: "list[weakref.ref[Recording]]" = field(default_factory=list, init=False)
    """Recordings whose outputs it reads in place; the owner keeps them alive."""
    draws: list[int] = field(default_factory=list, init=False)
    """See `table.Seen.draws`."""
    closed: bool = field(default=False, init=False)
    """True if it is never to be replayed: it was freed, or its outputs are being moved right now."""

    def __post_init__(
        self,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        uses: Uses | None,
    ) -> None:
        self.replay: Callable[[], None] = self.graph.replay
        self._consumed, self._users = tuple(self.consumes), tuple(self.consumes.values())
        self._copies = copies_in(self.placeholders)
        self._write_back = [
            (i, self.placeholders[i]) for i in sorted(self.written) if i in self.placeholders
        ]
        self.copied_inputs = {
            i: p.target.nbytes * (1 + (i in self.written)) for i, p in self.placeholders.items()
        }
        """Bytes that each replay copies, by position of the input; those that it writes are copied back, too."""
        self.copied_bytes = sum(self.copied_inputs.values())
        self._outputs = list(outputs)
        by_storage = {
            value.untyped_storage().data_ptr(): i
            for i, value in reversed(list(enumerate(staged)))
            if isinstance(value, torch.Tensor)
            and i not in self.consumes
            and value.untyped_storage().nbytes()
        }
        aliases: dict[int, InputAlias] = {}
        own: dict[int, int] = {}
        numbers: dict[int, int] = {}
        tensors: dict[int, torch.Tensor] = {}
        for n, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                continue
            alias = alias_of_input(output, staged, by_storage)
            if alias is not None:
                aliases[n] = alias
            elif output.untyped_storage().data_ptr() in self.outside:
                continue  # handed out as that very tensor: no replay writes where it lies
            else:
                own[n] = numbers.setdefault(id(output), len(numbers))
                tensors[own[n]] = output
            self._outputs[n] = None
        self.own = own
        """Numbers of the memory's tensors that outputs are, by position."""
        self.views: Mapping[int, InputAlias] = aliases
        """Outputs that are (views of) inputs, by position."""
        uses = uses or [(True, False)] * len(outputs)
        shown, read = ({own[n] for n in own if uses[n][k]} for k in (0, 1))
        of_each = [(number in shown, number in read) for number in tensors]
        self.memory = OutputMemory([*tensors.values()], of_each, share=self.graph.share)
        self.hand_out(len(outputs))

    def hand_out(self, count: int) -> None:
        """Have `run` return the first outputs only. See `OutputMemory.hand_out`."""
        own = {n: number for n, number in self.own.items() if n < count}
        num_own = max(own.values(), default=-1) + 1
        self.memory.hand_out(num_own)
        aliases = {n: alias for n, alias in self.views.items() if n < count}
        same = {n: a.index for n, a in aliases.items() if a.identity}
        views = {n: a.view for n, a in aliases.items() if not a.identity}
        self._same_of, self._views = fast.taker(tuple(same.values())), tuple(views.values())
        constants = [n for n in range(count) if n not in own | aliases]
        self._constants = [self._outputs[n] for n in constants]
        made = [*same, *views, *constants]
        places = own | {n: num_own + k for k, n in enumerate(made)}
        self.own_at = tuple(own)
        """Positions of the outputs that lie in its memory."""
        self._arrange = fast.taker(tuple(places[n] for n in range(count)))
        """Takes outputs in their order from what `run` makes of each kind."""

    def reads_what_is_gone(self) -> bool:
        """Tell whether a recording whose outputs it reads is gone: another one at the same place was made after it."""
        makers = [maker() for maker in self.makers]
        return any(maker is None or maker.closed for maker in makers)

    def may_replay(self, args: Sequence[Any]) -> bool:
        """Tell whether a replay writes no inputs that somebody else holds."""
        if self.closed:
            return False
        return not self._consumed or fast.exclusive(args, self._consumed, self._users)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Copy in what moves, replay, and hand out the outputs.

        **Lifetime:** tensors returned are fresh aliases of pool memory: the next replay of this recording writes
        over them, unless `Owner.is_safe` is asked first.
        """
        views = fast.views(args, self._views)  # may raise: nothing is written
        copy_in(self._copies, args)
        self.replay()
        for i, placeholder in self._write_back:
            placeholder.copy_to(args[i].data)
        if self.counted:
            written = [args[i] for i in self.counted if not args[i].is_inference()]
            torch.autograd.graph.increment_version(written)
        given = [*self._same_of(args), *views, *self._constants]
        return self._arrange([*self.memory.aliases(), *given])

    # ---- what is held

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move held outputs to memory of their own; returns bytes copied. Where that fails it is never replayed again."""
        closed, self.closed = self.closed, True
        copied = self.memory.rescue(blocks)
        self.closed = closed
        self.stats.rescues += copied > 0
        self.stats.rescued_bytes += copied
        return copied

    def close(self, *, whole_pool: bool = True) -> None:
        """Free the graph; outputs that somebody holds stay theirs. See `OutputMemory.let_go`."""
        self.closed = True
        self.memory.let_go(whole_pool=whole_pool)
        self.graph.reset()


Given = tuple[Recording, int, torch_private.WeakStorage, dict[int, int]]
"""A recording and one of its blocks, the storage that owns it, and the inputs on it with the users that this may have."""


def give(
    owner: Owner, pool_index: int, args: Sequence[Any], pooled: Sequence[int]
) -> tuple[list[Given], dict[int, torch.Tensor]]:
    """Take blocks of earlier recordings that nobody but this call's inputs holds; returns inputs that own them.

    The callable drops them where it needs them no longer, and later temporaries and outputs lie on them: saved tensors
    die inside the backward. A replay therefore overwrites them, and asks `Recording.may_replay` first.
    """
    groups: dict[int, list[int]] = {}
    for i in pooled:
        groups.setdefault(args[i].untyped_storage().data_ptr(), []).append(i)
    given, owning = list[Given](), dict[int, torch.Tensor]()
    for address, positions in groups.items():
        found = owner.block_at(pool_index, address)
        if found is None:
            continue
        recording, number, references = found
        users = dict.fromkeys(positions, references + len(positions))
        if fast.exclusive(args, positions, [*users.values()]):
            storage = recording.memory.give(number)
            given.append((recording, number, torch_private.WeakStorage(storage), users))
            owning |= {i: torch_private.on_storage(storage, args[i]) for i in positions}
    return given, owning


def take_back(given: Sequence[Given]) -> dict[int, int]:
    """Hand living storages back to their recordings; returns the inputs that died, and how many users each had."""
    consumed: dict[int, int] = {}
    for recording, number, weak, users in given:
        storage = weak.get()
        if storage is None:
            consumed.update(users)
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
        pool_index: int,
        uses: Uses | None = None,
        *,
        copied: Collection[int] = (),
    ) -> Recording:
        """Record one signature; nobody but `args` may hold inputs that are to die inside.

        Raises `CaptureError` where the callable gives an input another shape.
        """
        owner, layout = self.owner, self.layout
        released = owner.begin_recording(pool_index)
        placeholders = self._placeholders(args, sorted({*layout.copied, *copied}))
        given, owning = give(owner, pool_index, args, [i for i in layout.pooled if i not in copied])
        staged = [placeholders[i].tensor if i in placeholders else a for i, a in enumerate(args)]
        if self.finds_writes:
            staged = [counting(value) for value in staged]
        passed = staged.copy()
        for i in list(owning):
            passed[i] = owning.pop(i)
        watched = Watched(staged if self.finds_writes else ())

        def fn(args: list[Any]) -> Sequence[Any]:
            # Inside of the driver's own watching: what it sees lies where the graph has it.
            with watched:
                return self.fn(args)

        if not self.finds_writes:
            fn = self.fn
        try:
            with torch_private.autocast_cache_off():
                graph, outputs = owner.driver.record(
                    fn, passed, opaque=self.opaque, pool_index=pool_index
                )
        finally:
            passed.clear()
            consumes = take_back(given)
        watched.refuse_new_layouts()
        recording = Recording(
            graph,
            outputs,
            staged,
            placeholders,
            layout.mutated | watched.written(),
            uses,
            consumes=consumes,
            outside=self._outside(watched, outputs, pool_index) if self.finds_writes else {},
            written_outside=frozenset(watched.wrote & watched.outside.keys()),
            released=released,
            counted=watched.counted(),
            pool_index=pool_index,
            stats=self.stats,
        )
        del outputs
        recording.memory.seal()  # last of all: nobody else holds them
        return recording

    def _outside(
        self, watched: Watched, outputs: Sequence[Any], pool_index: int
    ) -> dict[int, torch.UntypedStorage]:
        """Return the storages, by address, that the callable read or returned but neither got nor made."""
        owner = self.owner
        found = watched.outside | watched.unknown(outputs)
        elsewhere = [v for v in outputs if has_place(v) and v.device != owner.driver.device]
        found |= {v.untyped_storage().data_ptr(): v.untyped_storage() for v in elsewhere}
        if found:  # of these, the driver knows what was made beside operators
            made = owner.driver.live_blocks(pool_index)
            for address in found.keys() & made:
                if owner.block_at(pool_index, address) is None:
                    del found[address]
        return found

    def _placeholders(self, args: Sequence[Any], copied: Sequence[int]) -> dict[int, Placeholder]:
        """Copies of inputs. See Note [Placeholders are shared]."""
        numbers: Counter[tuple[Any, ...]] = Counter()
        known = self.owner.placeholders if self.shares_inputs else {}
        found = dict[int, Placeholder]()
        for i in copied:
            value, info = args[i], self.layout.infos[i]
            like, whole = layout_of(value), info.whole_storage
            key = (numbers[like], *like, *(place_of(value) if whole else ()))
            numbers[like] += 1
            known[key] = found[i] = known.get(key) or Placeholder(value, whole_storage=whole)
            found[i].copy_from(value)
        return found
