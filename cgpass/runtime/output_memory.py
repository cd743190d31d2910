"""`OutputMemory`: the memory that a recording's outputs lie in, who holds it, and how it changes hands.

Note [Memory of outputs]
    The driver returns outputs that own blocks of the pool. Callers never get those but aliases of stand-ins, which lie
    at the same addresses and own nothing; whoever holds an output holds its stand-in's storage, and is counted there.
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

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.placeholders import bytes_of

_OF_A_COUNT = next(map(sys.getrefcount, [object()])) - 1
"""References that counting them with `map` adds."""


@dataclass(eq=False)
class _Block:
    """Memory of one storage, and the outputs on it."""

    address: int
    owning: torch.UntypedStorage | None
    base: torch.Tensor
    """The stand-in's storage as bytes."""
    members: list[int] = field(default_factory=list)
    visible: bool = False
    """Whether the user gets an output on it."""
    internal: bool = False
    """Whether other partitions or the backward get one."""


class OutputMemory:
    """Blocks under the outputs that a recording makes. See Note [Memory of outputs]."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        uses: Sequence[tuple[bool, bool]],
        *,
        share: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self._share = share
        self._blocks: list[_Block] = []
        by_address: dict[int, _Block] = {}
        self.tensors: list[torch.Tensor] = []
        """Stand-ins, one per output."""
        for number, (output, use) in enumerate(zip(outputs, uses, strict=True)):
            storage = output.untyped_storage()
            if storage.nbytes() == 0:
                self.tensors.append(output.detach())
                continue
            block = by_address.get(storage.data_ptr())
            if block is None:
                block = by_address[storage.data_ptr()] = self._new_block(storage)
            block.members.append(number)
            block.visible |= use[0]
            block.internal |= use[1]
            self.tensors.append(torch_private.on_storage(block.base.untyped_storage(), output))
        self.watch: fast.Watch = ((), b"")
        """Storages of the stand-ins. Whoever keeps one of them counts as holding it."""
        self._addresses = tuple(block.address for block in self._blocks)
        self._users: tuple[int, ...] = ()
        self._lets_go = False

    def _new_block(self, storage: torch.UntypedStorage) -> _Block:
        base = fast.stand_in(storage.data_ptr(), storage.nbytes(), bytes_of(storage))
        block = _Block(storage.data_ptr(), storage, base)
        self._blocks.append(block)
        return block

    def seal(self) -> None:
        """Note how many references there are to each stand-in while nobody else holds it."""
        self._count_again(range(len(self._blocks)))

    # ---- who holds it

    def any_held(self) -> bool:
        """Whether anybody holds an output: Python, views, autograd's saved tensors, `.grad` fields, closures."""
        return fast.any_held(*self.watch)

    def held(self, among: Iterable[int] | None = None) -> list[int]:
        """Numbers of the blocks that somebody holds."""
        found = fast.held(*self.watch)
        return found if among is None else [k for k in among if k in found]

    def _in_place(self, blocks: Iterable[int]) -> list[int]:
        """Blocks whose stand-ins were not enlarged, emptied or shared by who holds them."""
        return [k for k in blocks if self.watch[0][k].data_ptr() == self._addresses[k]]

    def addresses(self) -> list[int]:
        """Where the blocks lie."""
        return list(self._addresses)

    def num_bytes(self) -> int:
        """Size of all blocks."""
        return sum(block.base.numel() for block in self._blocks)

    def num_users(self, address: int) -> tuple[int, int] | None:
        """Number of the kept block at an address, and this recording's own references to its stand-in."""
        for k, block in enumerate(self._blocks):
            if block.address == address and block.owning is not None:
                return k, self._users[k]
        return None

    # ---- rescue

    def can_rescue(self, blocks: Sequence[int]) -> bool:
        """Whether held blocks may move.

        What a backward that is still to come reads may not, or it would not find it: another recording serves better.
        """
        blocks = self._in_place(blocks)
        if not all(self._blocks[k].visible for k in blocks):
            return False
        if not any(self._blocks[k].internal for k in blocks):
            return True
        return all(self._blocks[k].visible for k in self._in_place(self.held()))

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move what is held to memory of its own, on the current stream; returns bytes copied."""
        if not blocks:
            return 0
        with torch.inference_mode(False), torch.no_grad():  # later calls' outputs are made of these
            return self._rescue(blocks)

    def _rescue(self, blocks: Sequence[int]) -> int:
        held = self._in_place(blocks)
        bases = [self._blocks[k].base for k in held]
        if bases:
            moved = [torch.empty_like(base) for base in bases]
            torch._foreach_copy_(moved, bases)
            fast.swap_storages(bases, moved)  # the holders have the copies, `moved` lie in the pool
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
        block = self._blocks[k]
        block.base = other
        for number in block.members:
            self.tensors[number] = torch_private.on_storage(
                other.untyped_storage(), self.tensors[number]
            )

    def _count_again(self, blocks: Collection[int]) -> None:
        """Count references to the stand-ins of blocks that nobody holds."""
        storages = tuple([block.base.untyped_storage() for block in self._blocks])
        users = count_users(storages)
        known = range(len(self._users))
        self._users = tuple(
            self._users[k] if k in known and k not in blocks else users[k]
            for k in range(len(self._blocks))
        )
        self.watch = (storages, watched(storages, self._users))

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
        if self._lets_go:  # that was broken off, and some may be the holders' already
            kept = []
        self._lets_go = True
        owners = [bytes_of(storage) for k in kept if (storage := self._blocks[k].owning)]
        fast.swap_storages([self._blocks[k].base for k in kept], owners)
        copied = self.rescue([k for k in held if k not in kept])
        for block in self._blocks:
            block.owning = None
        return copied


def count_users(storages: tuple[torch.UntypedStorage, ...]) -> tuple[int, ...]:
    """Numbers of references to storages: in C++, where their Python objects are one each, and to these objects."""
    counts = map(torch_private.storage_use_count, [storage._cdata for storage in storages])
    references = map(sys.getrefcount, storages)
    return tuple(a + b - _OF_A_COUNT for a, b in zip(counts, references, strict=True))


def watched(storages: Sequence[torch.UntypedStorage], users: Sequence[int]) -> bytes:
    """What `fast.any_held` compares storages with that have so many users while nobody else holds them."""
    numbers = array("q")
    for storage, count in zip(storages, users, strict=True):
        numbers.extend((storage._cdata, storage.data_ptr(), count))
    return numbers.tobytes()
