"""Outputs that are no memory of a recording's own: views of inputs, and copies that callers keep."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.placeholders import num_bytes, overlaps_itself
from cgpass.runtime.signature import layout_of


@dataclass(frozen=True)
class InputAlias:
    """An output that is (a view of) an input: built from the call's own input, not from the recorded one."""

    index: int
    identity: bool
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    """From the input's first element to the output's."""
    conj: bool = False
    neg: bool = False

    def is_plain_view_of(self, value: torch.Tensor) -> bool:
        """Whether `fast.views` makes this output of an input like `value`."""
        lazy = self.conj or self.neg or value.is_conj() or value.is_neg()
        return not self.identity and not lazy and self.dtype == value.dtype

    def as_view(self) -> fast.ViewSpec:
        """This output, for `fast.views`."""
        return self.index, self.size, self.stride, self.offset_bytes // self.dtype.itemsize

    def fits(self, value: torch.Tensor) -> bool:
        """Whether this output can be made of `value`: another dtype may not start just anywhere."""
        start = value.storage_offset() * value.dtype.itemsize + self.offset_bytes
        return bool(start % self.dtype.itemsize == 0)

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The output for a call whose input is `value`, unless it is a plain view of it."""
        if self.identity:
            return value
        itemsize = self.dtype.itemsize
        start = value.storage_offset() * value.dtype.itemsize + self.offset_bytes
        out = torch.empty(0, dtype=self.dtype, device=value.device)
        out.set_(value.untyped_storage(), start // itemsize, self.size, self.stride)
        return torch_private.with_lazy_bits(out, conj=self.conj, neg=self.neg)


def alias_of_input(
    output: torch.Tensor, inputs: Sequence[Any], by_storage: Mapping[int, int]
) -> InputAlias | None:
    """Which input an output is (a view of), if it is one; `by_storage` has the first input on the storage at an address."""
    storage = output.untyped_storage()
    index = by_storage.get(storage.data_ptr()) if storage.nbytes() else None
    if index is None:
        index = next((i for i, value in enumerate(inputs) if value is output), None)
        if index is None:
            return None
    source = inputs[index]
    itemsize = output.dtype.itemsize
    offset = output.storage_offset() * itemsize - source.storage_offset() * source.dtype.itemsize
    same = offset == 0 and layout_of(output) == layout_of(source)
    return InputAlias(
        index,
        same,
        output.dtype,
        tuple(output.size()),
        output.stride(),
        offset,
        output.is_conj(),
        output.is_neg(),
    )


class CopyOut:
    """Copies some results of calls into memory of their own.

    What never changes between calls (layouts, which results share memory) is worked out once; no tensor is kept.
    """

    def __init__(self, results: Sequence[Any], positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        first: dict[int, int] = {}
        own: list[tuple[int, torch.Tensor]] = []
        self._twins: list[tuple[int, int]] = []
        for n in positions:
            tensor = results[n]
            if id(tensor) in first:
                self._twins.append((n, first[id(tensor)]))
            elif isinstance(tensor, torch.Tensor):
                first[id(tensor)] = n
                own.append((n, tensor))
        shared = Counter(t.untyped_storage().data_ptr() for _, t in own)
        together = [
            (n, t)
            for n, t in own
            if t.numel() and (shared[t.untyped_storage().data_ptr()] > 1 or overlaps_itself(t))
        ]
        whole = {n for n, _ in together}
        leaders, self._parts = _leaders_and_parts(together)
        self._whole = [n for n, _ in leaders]
        simple: dict[torch.dtype, list[int]] = {}
        for n, tensor in own:
            if n not in whole:
                simple.setdefault(tensor.dtype, []).append(n)
        groups = map(tuple, simple.values())
        self._simple = [(members, fast.taker(members)) for members in groups]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in leaders}
        self.copied_bytes = sum(num_bytes(t) for n, t in own if n not in whole)
        self.copied_bytes += sum(storage.nbytes() for storage in storages.values())

    def run(self, results: list[Any]) -> None:
        """Copy what `results` has, and put the copies there, on the current stream.

        **Lifetime:** the copies are the caller's; copies of outputs that share memory share memory.
        """
        for positions, take in self._simple:
            fast.put(results, positions, fast.copies(take(results)))
        storages: dict[int, torch.UntypedStorage] = {}
        for n in self._whole:
            tensor = results[n]
            source = tensor.untyped_storage()
            if source.data_ptr() not in storages:
                storages[source.data_ptr()] = source.clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage = storages[source.data_ptr()]
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            results[n] = torch_private.with_lazy_bits(
                copy, conj=tensor.is_conj(), neg=tensor.is_neg()
            )
        for n, part in self._parts:
            (results[n],) = fast.views(results, (part,))
        for n, twin in self._twins:
            results[n] = results[twin]


def part_of(leader: torch.Tensor, tensor: torch.Tensor, position: int) -> fast.ViewSpec | None:
    """How to make `tensor` of `leader`, the output at `position` on the same storage; None if that is no plain view."""
    lazy = any(t.is_conj() or t.is_neg() for t in (leader, tensor))
    if lazy or leader.dtype != tensor.dtype:
        return None
    offset = int(tensor.storage_offset()) - int(leader.storage_offset())
    return position, tuple(tensor.size()), tensor.stride(), offset


def _leaders_and_parts(
    tensors: Sequence[tuple[int, torch.Tensor]],
) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, fast.ViewSpec]]]:
    """Tensors to be laid on a storage, and those that are views of these: they share the count of writes."""
    leaders: list[tuple[int, torch.Tensor]] = []
    parts: list[tuple[int, fast.ViewSpec]] = []
    first: dict[int, tuple[int, torch.Tensor]] = {}
    for n, tensor in tensors:
        position, leader = first.setdefault(tensor.untyped_storage().data_ptr(), (n, tensor))
        part = part_of(leader, tensor, position)
        if leader is tensor or part is None:
            leaders.append((n, tensor))
        else:
            parts.append((n, part))
    return leaders, parts
