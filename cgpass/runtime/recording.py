"""One captured graph with its placeholders and outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass import _torch
from cgpass.runtime.driver import CapturedGraph
from cgpass.runtime.liveness import HeldStorages


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of `tensor` may share memory (expanded tensors, sliding windows)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * size
    return False


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between `tensor`'s first and last element, as one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((0 if tensor.numel() == 0 else extent,), (1,))


class Placeholder:
    """Memory of fixed address that stands for a copied input.

    Laid out exactly as the input it was made for. Inputs with overlapping elements are copied as the memory they span.
    """

    __slots__ = ("flat", "target", "tensor")

    def __init__(self, like: torch.Tensor) -> None:
        """Args: like: an input of the layout to be copied."""
        self.flat = overlaps_itself(like)
        if self.flat:
            self.target = torch.empty_like(flat_view(like))
            self.tensor = self.target.as_strided(like.size(), like.stride(), 0)
        else:
            self.target = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device=like.device
            )
            self.tensor = self.target

    def copy_from(self, value: torch.Tensor) -> None:
        """Give the placeholder the value of `value`."""
        self.target.copy_(self.source(value))

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """What is copied into `target` (or back from it) when the input is `value`."""
        return flat_view(value) if self.flat else value


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

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The output for a call whose input is `value`."""
        if self.identity:
            return value
        itemsize = self.dtype.itemsize
        start = value.storage_offset() * value.dtype.itemsize + self.offset_bytes
        if self.dtype == value.dtype:
            return value.as_strided(self.size, self.stride, start // itemsize)
        out = torch.empty(0, dtype=self.dtype, device=value.device)
        return out.set_(value.untyped_storage(), start // itemsize, self.size, self.stride)


def _own_or_alias(
    output: torch.Tensor, inputs: Sequence[Any], by_storage: Mapping[int, int]
) -> "torch.Tensor | InputAlias":
    """An output as the recording keeps it: the tensor if the graph makes it, else which input it is a view of."""
    storage = output.untyped_storage()
    index = by_storage.get(storage.data_ptr()) if storage.nbytes() else None
    if index is None:
        index = next((i for i, value in enumerate(inputs) if value is output), None)
        if index is None:
            return output.detach()
    source = inputs[index]
    itemsize = output.dtype.itemsize
    offset = output.storage_offset() * itemsize - source.storage_offset() * source.dtype.itemsize
    same = (
        offset == 0
        and output.dtype == source.dtype
        and output.size() == source.size()
        and output.stride() == source.stride()
    )
    return InputAlias(index, same, output.dtype, tuple(output.size()), output.stride(), offset)


class Recording:
    """One captured graph: where its inputs must lie, and what it hands out.

    Made by `CUDAGraphWrapper`, which also checks that a call's inputs match before it calls `run`.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        outputs: Sequence[Any],
        staged: Sequence[Any],
        placeholders: Mapping[int, Placeholder],
        *,
        mutated: Sequence[int],
        private: frozenset[int],
        birth: int,
    ) -> None:
        """Describe a recorded graph.

        Args:
            graph: What the driver recorded.
            outputs: What the recorded callable returned.
            staged: The inputs it was recorded with, placeholders in place of copied ones.
            placeholders: Of the copied inputs, by position.
            mutated: Copied inputs that the graph writes.
            private: Outputs that the caller of `run` copies at once and gives to nobody.
            birth: Position in the owner's order of recordings.
        """
        self.birth = birth
        self.last_used = 0
        self.replay: Callable[[], None] = graph.replay
        self._graph = graph
        self._copies = _by_dtype(placeholders)
        self._write_back = [(i, placeholders[i]) for i in mutated if i in placeholders]
        self.copied_bytes = sum(
            _bytes(p.target) for members in self._copies for _, p in members
        ) + sum(_bytes(p.target) for _, p in self._write_back)
        by_storage = {
            value.untyped_storage().data_ptr(): i
            for i, value in reversed(list(enumerate(staged)))
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes()
        }
        self._outputs = [
            _own_or_alias(output, staged, by_storage)
            if isinstance(output, torch.Tensor)
            else output
            for output in outputs
        ]
        own = [(n, t) for n, t in enumerate(self._outputs) if isinstance(t, torch.Tensor)]
        self.own_outputs = [tensor for _, tensor in own]
        self._escaping = [(n, tensor) for n, tensor in own if n not in private]
        self._aliases = [(n, a) for n, a in enumerate(self._outputs) if isinstance(a, InputAlias)]
        self._copy_out: dict[tuple[int, ...], CopyOut] = {}

    def seal(self) -> None:
        """Note who holds the outputs when nothing was handed out yet; to be called once, last of all."""
        escaping = [tensor for _, tensor in self._escaping]
        self.held = HeldStorages(escaping) if escaping else None

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Copy in what moves, replay, and hand out the outputs.

        **Lifetime:** tensors returned are fresh aliases of pool memory: the next replay of this recording writes
        over them, unless `LiveOutputs` is asked first. Private ones are the recording's own tensors.
        """
        self.copy_in(args)
        self.replay()
        for i, placeholder in self._write_back:
            placeholder.source(args[i]).copy_(placeholder.target)
        outputs = self._outputs.copy()
        for n, tensor in self._escaping:
            outputs[n] = tensor.detach()
        for n, alias in self._aliases:
            outputs[n] = alias.of(args[alias.index])
        return outputs

    def copy_in(self, args: Sequence[Any]) -> None:
        """Copy the inputs that move into their placeholders."""
        for members in self._copies:
            torch._foreach_copy_(
                [p.target for _, p in members], [p.source(args[i]) for i, p in members]
            )

    def output_at(self, position: int) -> Any:
        """The output at `position`: a tensor if it lies in the pool."""
        return self._outputs[position]

    def copy_out(
        self, positions: tuple[int, ...], targets: tuple[int, ...], results: list[Any]
    ) -> int:
        """Put copies of pool tensors where a caller keeps them.

        Args:
            positions: Outputs of this recording; those that don't lie in the pool are left alone.
            targets: Where in `results` the copy of each goes.
            results: Changed in place.

        Returns:
            Bytes copied.
        """
        plan = self._copy_out.get(positions)
        if plan is None:
            plan = self._copy_out[positions] = CopyOut([self._outputs[p] for p in positions])
        for n, copy in plan.run():
            results[targets[n]] = copy
        return plan.copied_bytes

    def close(self) -> None:
        """Free the graph; memory of outputs that somebody holds stays until they let go."""
        self._graph.reset()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _by_dtype(placeholders: Mapping[int, Placeholder]) -> list[list[tuple[int, Placeholder]]]:
    groups: dict[torch.dtype, list[tuple[int, Placeholder]]] = {}
    for i, placeholder in sorted(placeholders.items()):
        if placeholder.target.numel():
            groups.setdefault(placeholder.target.dtype, []).append((i, placeholder))
    return list(groups.values())


class _SameDtype:
    """Outputs that one call copies."""

    __slots__ = ("dtype", "layouts", "numbers", "tensors")

    def __init__(self, members: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.numbers = [n for n, _ in members]
        self.tensors = [tensor for _, tensor in members]
        self.layouts = [(tuple(t.size()), t.stride()) for t in self.tensors]
        self.dtype = self.tensors[0].dtype


class CopyOut:
    """Copies some outputs of a recording into memory of their own.

    What never changes between replays (layouts, which outputs share memory) is worked out once.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        """Args: outputs: of a recording; only its pool tensors are copied."""
        own = [(n, t) for n, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
        addresses = [t.untyped_storage().data_ptr() for _, t in own]
        simple: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        self._whole: list[tuple[int, torch.Tensor]] = []
        for (n, tensor), address in zip(own, addresses, strict=True):
            if tensor.numel() and (addresses.count(address) > 1 or overlaps_itself(tensor)):
                self._whole.append((n, tensor))
            else:
                simple.setdefault(tensor.dtype, []).append((n, tensor))
        self._simple = [_SameDtype(members) for members in simple.values()]
        self._device = own[0][1].device if own else torch.device("cpu")
        whole = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in self._whole}
        self.copied_bytes = sum(
            _bytes(t) for _, t in own if t.untyped_storage().data_ptr() not in whole
        )
        self.copied_bytes += sum(storage.nbytes() for storage in whole.values())

    def run(self) -> list[tuple[int, torch.Tensor]]:
        """Copy, on the current stream.

        Returns:
            Number of the output and its copy. **Lifetime:** the caller's; copies of outputs that share memory share
            memory.
        """
        allocate = _torch.strided_allocator(self._device)
        copied: list[tuple[int, torch.Tensor]] = []
        for group in self._simple:
            copies = [allocate(size, stride, group.dtype) for size, stride in group.layouts]
            torch._foreach_copy_(copies, group.tensors)
            copied += zip(group.numbers, copies, strict=True)
        storages: dict[int, torch.UntypedStorage] = {}
        for n, tensor in self._whole:
            source = tensor.untyped_storage()
            if source.data_ptr() not in storages:
                storages[source.data_ptr()] = source.clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage = storages[source.data_ptr()]
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            copied.append((n, copy))
        return copied
