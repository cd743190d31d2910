"""Outputs of recordings: the memory that they lie in and who holds it, and views of inputs.

Note [Memory of outputs]
    The driver returns outputs that own blocks of the pool. Callers never get those but aliases of stand-ins, which lie
    at the same addresses and own nothing; who holds an output holds its stand-in's storage, and is counted there.
    A block is
    - kept, as long as the recording holds on to the owning storage: no later recording lies on it;
    - released, when the next recording is about to be made in this pool and nobody holds the output: it may be used
      again, as a plain allocator would use it. Replays go on writing it.
    - given away: to the recording of the partition that reads it last, inside of which it dies as it would without
      graphs.

    Before a replay overwrites what somebody holds, the held storage is *rescued*: its bytes are copied to memory of
    its own and the stand-in's storage is swapped with that. Every holder follows, since all of them hold the storage;
    the recording goes on with a new stand-in at the old address.

    Holders may do to an output's storage what they may without graphs: enlarge, empty or share it. It then lies
    elsewhere and is theirs; the block counts as held until the recording has a new stand-in there, too.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.inputs import bytes_of, layout_of

if TYPE_CHECKING:
    import weakref

Uses = Sequence[tuple[bool, bool]]
"""Of each output whether the user gets it, and whether other partitions or the backward do."""


@dataclass(eq=False)
class _Block:
    """Memory of one storage, and the outputs on it."""

    address: int
    owning: torch.UntypedStorage | None
    base: torch.Tensor
    """The stand-in's storage as bytes."""
    members: list[int] = field(default_factory=list)
    visible: bool = False
    """True if the user gets an output on it."""
    internal: bool = False
    """True if other partitions or the backward get one."""


def _watches(watch: bytes) -> list[bytes]:
    """Return a watch for each storage: see `fast.Watch`."""
    return [watch[at : at + 24] for at in range(0, len(watch), 24)]


class OutputMemory:
    """Blocks under the outputs that a recording makes. See Note [Memory of outputs]."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        uses: Uses,
        *,
        share: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self._share = share
        self._blocks: list[_Block] = []
        by_address: dict[int, _Block] = {}
        self.tensors: list[torch.Tensor] = []
        """Stand-ins, one per output."""
        self._leaders: list[int] = []
        """The first stand-in on each one's storage."""
        for number, (output, use) in enumerate(zip(outputs, uses, strict=True)):
            storage = output.untyped_storage()
            if storage.nbytes() == 0:
                self.tensors.append(output.detach())
                self._leaders.append(number)
                continue
            block = by_address.get(storage.data_ptr())
            if block is None:
                base = fast.stand_in(storage.data_ptr(), storage.nbytes(), bytes_of(storage))
                block = by_address[storage.data_ptr()] = _Block(storage.data_ptr(), storage, base)
                self._blocks.append(block)
            block.members.append(number)
            block.visible |= use[0]
            block.internal |= use[1]
            self._leaders.append(block.members[0])
            self.tensors.append(torch_private.on_storage(block.base.untyped_storage(), output))
        self.watch: fast.Watch = ((), b"")
        """Storages of the stand-ins. Who keeps one of them counts as holding it."""
        self.kept_for: weakref.ref[Any] | None = None
        """Who needs all that is held where it lies, as long as it exists."""

    def seal(self) -> None:
        """Note how many references there are to each stand-in while nobody else holds it, once."""
        self._count_again(range(len(self._blocks)))

    def aliases(self) -> list[torch.Tensor]:
        """New tensors on the stand-ins' storages, one per output (see `hand_out`). See `fast.aliases`."""
        if not torch.is_inference_mode_enabled():
            return fast.aliases(self.tensors, self._leaders)
        tensors = self.tensors[: len(self._leaders)]
        storages = [(t, t.untyped_storage()) for t in tensors]  # made in it: inference tensors
        return [torch_private.on_storage(s if s.nbytes() else s.clone(), t) for t, s in storages]

    def hand_out(self, count: int) -> None:
        """Have `aliases` be of the first stand-ins only: who needs the others' memory holds storages of `watch`."""
        self._leaders = self._leaders[:count]

    def blocks(self) -> dict[int, int]:
        """Return which block each output lies in, but those without memory."""
        return {n: k for k, block in enumerate(self._blocks) for n in block.members}

    def fill(self, blocks: Sequence[int], held: Sequence[torch.UntypedStorage]) -> None:
        """Copy what was rescued back to where it lay; nobody may hold these blocks by now."""
        if blocks:
            bases = [self._blocks[k].base for k in blocks]
            # who holds one may have enlarged it
            moved = [bytes_of(s)[: base.numel()] for s, base in zip(held, bases, strict=True)]
            torch._foreach_copy_(bases, moved)

    # ---- who holds it

    def any_held(self) -> bool:
        """Tell whether anybody holds an output: Python, views, autograd's saved tensors, `.grad` fields, closures."""
        return fast.any_held(*self.watch)

    def held(self, among: Iterable[int] | None = None) -> list[int]:
        """Numbers of the blocks that somebody holds."""
        now, before = _watches(fast.watched(self.watch[0])), _watches(self.watch[1])
        return [k for k in (range(len(now)) if among is None else among) if now[k] != before[k]]

    def _in_place(self, blocks: Iterable[int]) -> list[int]:
        """Blocks whose stand-ins were not enlarged, emptied or shared by who holds them."""
        return [k for k in blocks if self.watch[0][k].data_ptr() == self._blocks[k].address]

    def addresses(self) -> list[int]:
        """Return the addresses of the blocks."""
        return [block.address for block in self._blocks]

    def num_bytes(self) -> int:
        """Size of all blocks."""
        return sum(block.base.numel() for block in self._blocks)

    def num_users(self, address: int) -> tuple[int, int] | None:
        """Number of the kept block at an address, and this recording's own references to its stand-in."""
        for k, block in enumerate(self._blocks):
            if block.address == address and block.owning is not None:
                return k, array("q", self.watch[1])[3 * k + 2]
        return None

    # ---- rescue

    def can_rescue(self, blocks: Sequence[int]) -> bool:
        """Tell whether held blocks may move.

        What a backward that is still to come reads may not, or it would not find it: another recording serves better.
        """
        if self.is_kept():
            return False
        blocks = self._in_place(blocks)
        if not all(self._blocks[k].visible for k in blocks):
            return False
        if not any(self._blocks[k].internal for k in blocks):
            return True
        return all(self._blocks[k].visible for k in self._in_place(self.held()))

    def is_kept(self) -> bool:
        """Tell whether somebody needs it where it lies."""
        return self.kept_for is not None and self.kept_for() is not None

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move what is held to memory of its own, on the current stream; returns bytes copied."""
        if not blocks:
            return 0
        with torch.inference_mode(False), torch.no_grad():  # later calls' outputs are made of these
            held = self._in_place(blocks)
            bases = [self._blocks[k].base for k in held]
            if bases:
                moved = [torch.empty_like(base) for base in bases]
                torch._foreach_copy_(moved, bases)
                fast.swap_storages(bases, moved)  # the holders have the copies, `moved` the pool
                self._share(bases)
                for k, other in zip(held, moved, strict=True):
                    self._stand_in(k, other)
                del moved
            for k in set(blocks) - set(held):
                block = self._blocks[k]
                self._stand_in(k, fast.stand_in(block.address, block.base.numel(), block.base))
            self._count_again(blocks)
        return sum(base.numel() for base in bases)

    def _stand_in(self, k: int, other: torch.Tensor) -> None:
        """Go on with another stand-in for a block."""
        block, storage = self._blocks[k], other.untyped_storage()
        block.base = other
        for n in block.members:
            self.tensors[n] = torch_private.on_storage(storage, self.tensors[n])

    def _count_again(self, blocks: Collection[int]) -> None:
        """Count references to the stand-ins of blocks that nobody holds."""
        storages = tuple([block.base.untyped_storage() for block in self._blocks])
        now, before = _watches(fast.watched(storages)), _watches(self.watch[1])
        kept = [new if k in blocks else before[k] for k, new in enumerate(now)]
        self.watch = (storages, b"".join(kept))

    # ---- who owns it

    def release_unheld(self) -> None:
        """Give blocks that nobody holds back to the pool."""
        held = set(self.held())
        for k, block in enumerate(self._blocks):
            if k not in held:
                block.owning = None

    def released(self) -> tuple[int, ...]:
        """Numbers of the blocks that a recording made now may lie on."""
        return tuple(k for k, block in enumerate(self._blocks) if block.owning is None)

    def give(self, number: int) -> torch.UntypedStorage:
        """Hand a kept block's owning storage over."""
        block = self._blocks[number]
        storage, block.owning = block.owning, None
        assert storage is not None
        return storage

    def take_back(self, number: int, storage: torch.UntypedStorage) -> None:
        """Undo `give`."""
        self._blocks[number].owning = storage

    def let_go(self, *, whole_pool: bool = True) -> int:
        """Leave what is held to its holders, for good; returns bytes copied.

        Where nothing is replayed any more in this pool, kept blocks are left to the holders. Else older recordings go on
        writing them, and all that is held is copied.
        """
        held = self._in_place(self.held())
        kept = [k for k in held if whole_pool and self._blocks[k].owning is not None]
        # given first: where an interrupt comes before the swap, the next try copies them
        owners = [bytes_of(self.give(k)) for k in kept]
        fast.swap_storages([self._blocks[k].base for k in kept], owners)
        copied = self.rescue([k for k in held if k not in kept])
        for block in self._blocks:
            block.owning = None
        return copied


# ---- views of inputs


@dataclass(frozen=True)
class InputAlias:
    """An output that is (a view of) an input: built from the call's own input, not from the recorded one."""

    index: int
    identity: bool
    view: fast.ViewSpec
    """It, unless it is the input itself."""


def alias_of_input(
    output: torch.Tensor, inputs: Sequence[Any], by_storage: Mapping[int, int]
) -> InputAlias | None:
    """Find the input that an output is (a view of), if any; `by_storage` has the first input on the storage at an address."""
    storage = output.untyped_storage()
    index = by_storage.get(storage.data_ptr()) if storage.nbytes() else None
    if index is None:
        index = next((i for i, value in enumerate(inputs) if value is output), None)
        if index is None:
            return None
    source = inputs[index]
    offset = output.storage_offset() * output.dtype.itemsize
    offset -= source.storage_offset() * source.dtype.itemsize
    is_it = offset == 0 and layout_of(output) == layout_of(source)
    return InputAlias(index, is_it, (index, torch_private.tensor_at_address(output), offset))
