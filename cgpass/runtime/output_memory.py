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

    Where this process can't swap storages (no compiler, and a torch that can't) the owning storages are their own
    stand-ins, are kept for ever, and nothing can be rescued.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from cgpass import _torch
from cgpass.runtime import fast
from cgpass.runtime.placeholders import bytes_of


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
        self, outputs: Sequence[torch.Tensor], uses: Sequence[tuple[bool, bool]], *, lean: bool
    ) -> None:
        """Take over the driver's outputs; nobody else may go on holding them.

        Args:
            outputs: What the graph writes, each tensor once.
            uses: Of each, whether the user gets it, and whether other partitions or the backward do.
            lean: Whether storages can be swapped, so that stand-ins are of use.
        """
        self._lean = lean
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
            self.tensors.append(_torch.on_storage(block.base.untyped_storage(), output))
        self._cdatas: tuple[int, ...] = ()
        self._baseline: tuple[int, ...] = ()

    def _new_block(self, storage: torch.UntypedStorage) -> _Block:
        stand_in = storage
        if self._lean:
            stand_in = _torch.storage_at(storage.data_ptr(), storage.nbytes(), storage.device)
        block = _Block(storage.data_ptr(), storage if self._lean else None, bytes_of(stand_in))
        self._blocks.append(block)
        return block

    def seal(self) -> None:
        """Note how many references there are to each stand-in while nobody else holds it."""
        self._cdatas = tuple(block.base.untyped_storage()._cdata for block in self._blocks)
        self._baseline = tuple(map(_torch.storage_use_count, self._cdatas))

    # ---- who holds it

    def any_held(self) -> bool:
        """Whether anybody holds an output: Python, views, autograd's saved tensors, `.grad` fields, closures."""
        return fast.any_held(self._cdatas, self._baseline)

    def held(self, among: Iterable[int] | None = None) -> list[int]:
        """Numbers of the blocks that somebody holds."""
        numbers = range(len(self._blocks)) if among is None else among
        return [
            k for k in numbers if _torch.storage_use_count(self._cdatas[k]) != self._baseline[k]
        ]

    def addresses(self) -> list[int]:
        """Where the blocks lie."""
        return [block.address for block in self._blocks]

    def members(self, blocks: Sequence[int]) -> frozenset[int]:
        """Numbers of the tensors that lie in blocks."""
        return frozenset(number for k in blocks for number in self._blocks[k].members)

    def num_bytes(self, blocks: Iterable[int] | None = None) -> int:
        """Size of blocks, of all by default."""
        numbers = range(len(self._blocks)) if blocks is None else blocks
        return sum(self._blocks[k].base.numel() for k in numbers)

    def num_users(self, address: int) -> tuple[int, int] | None:
        """Number of the kept block at an address, and this recording's own references to its stand-in."""
        for k, block in enumerate(self._blocks):
            if block.address == address and block.owning is not None:
                return k, self._baseline[k]
        return None

    # ---- rescue

    def can_rescue(self, blocks: Sequence[int]) -> bool:
        """Whether held blocks may move.

        What a backward that is still to come reads may not, or it would not find it: another recording serves better.
        """
        if not self._lean or not all(self._blocks[k].visible for k in blocks):
            return False
        if not any(self._blocks[k].internal for k in blocks):
            return True
        return all(self._blocks[k].visible for k in self.held())

    def rescue(self, blocks: Sequence[int]) -> int:
        """Move what is held to memory of its own, on the current stream; returns bytes copied."""
        if not blocks:
            return 0
        bases = [self._blocks[k].base for k in blocks]
        with torch.no_grad():
            moved = [torch.empty_like(base) for base in bases]
            torch._foreach_copy_(moved, bases)
        self._replace(blocks, moved)
        return sum(base.numel() for base in bases)

    def _replace(self, blocks: Sequence[int], others: Sequence[torch.Tensor]) -> None:
        """Give the holders the memory of `others`, and the recording new stand-ins on what the holders had."""
        fast.swap_storages([self._blocks[k].base for k in blocks], others)
        for k, other in zip(blocks, others, strict=True):
            block = self._blocks[k]
            block.base = other
            for number in block.members:
                self.tensors[number] = _torch.on_storage(
                    other.untyped_storage(), self.tensors[number]
                )
        self._count_again(blocks)

    def _count_again(self, blocks: Iterable[int]) -> None:
        cdatas, baseline = list(self._cdatas), list(self._baseline)
        for k in blocks:
            cdatas[k] = self._blocks[k].base.untyped_storage()._cdata
            baseline[k] = _torch.storage_use_count(cdatas[k])
        self._cdatas, self._baseline = tuple(cdatas), tuple(baseline)

    # ---- who owns it

    def release_unheld(self) -> None:
        """Give blocks that nobody holds back to the pool."""
        if self._lean:
            held = set(self.held())
            for k, block in enumerate(self._blocks):
                if k not in held:
                    block.owning = None

    def released(self) -> tuple[int, ...]:
        """Numbers of the blocks that a recording made now may lie on."""
        if not self._lean:
            return ()
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

    @property
    def is_lean(self) -> bool:
        """Whether held blocks can be moved."""
        return self._lean

    def let_go(self, *, whole_pool: bool = True) -> int:
        """Leave what is held to its holders, for good; returns bytes copied.

        Args:
            whole_pool: Whether nothing is replayed any more in this pool: then kept blocks are left to the holders.
                Else older recordings go on writing them, and all that is held is copied.
        """
        if not self._lean:
            return 0
        held = self.held()
        kept = [k for k in held if whole_pool and self._blocks[k].owning is not None]
        owners = [bytes_of(self.give(k)) for k in kept]
        fast.swap_storages([self._blocks[k].base for k in kept], owners)
        copied = self.rescue([k for k in held if k not in kept])
        for block in self._blocks:
            block.owning = None
        return copied
