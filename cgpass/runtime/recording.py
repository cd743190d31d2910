"""One captured graph with its placeholders and outputs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass import _torch
from cgpass.runtime import fast
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


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory: `tensor` without its conjugate and negative bits."""
    return _torch.with_lazy_bits(tensor, conj=tensor.is_conj(), neg=tensor.is_neg())


class Placeholder:
    """Memory of fixed address that stands for a copied input.

    Laid out exactly as the input it was made for. Inputs with overlapping elements are copied as the memory they span.
    """

    __slots__ = ("flat", "lazy", "target", "tensor")

    def __init__(self, like: torch.Tensor) -> None:
        """Args: like: an input of the layout to be copied."""
        conj, neg = like.is_conj(), like.is_neg()
        self.lazy = conj or neg
        like = memory_of(like)
        self.flat = overlaps_itself(like)
        if self.flat:
            self.target = torch.empty_like(flat_view(like))
            self.tensor = self.target.as_strided(like.size(), like.stride(), 0)
        else:
            self.target = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device=like.device
            )
            self.tensor = self.target
        self.tensor = _torch.with_lazy_bits(self.tensor, conj=conj, neg=neg)

    def copy_from(self, value: torch.Tensor) -> None:
        """Give the placeholder the value of `value`."""
        self.target.copy_(self.source(value))

    def source(self, value: torch.Tensor) -> torch.Tensor:
        """What is copied into `target` (or back from it) when the input is `value`."""
        if self.lazy:
            value = memory_of(value)
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
    conj: bool = False
    neg: bool = False

    def is_plain_view_of(self, value: torch.Tensor) -> bool:
        """Whether `fast.views` makes this output of an input like `value`."""
        lazy = self.conj or self.neg or value.is_conj() or value.is_neg()
        return not self.identity and not lazy and self.dtype == value.dtype

    def as_view(self) -> fast.ViewSpec:
        """This output, for `fast.views`."""
        return self.index, self.size, self.stride, self.offset_bytes // self.dtype.itemsize

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The output for a call whose input is `value`, unless it is a plain view of it."""
        if self.identity:
            return value
        itemsize = self.dtype.itemsize
        start = value.storage_offset() * value.dtype.itemsize + self.offset_bytes
        out = torch.empty(0, dtype=self.dtype, device=value.device)
        out.set_(value.untyped_storage(), start // itemsize, self.size, self.stride)
        return _torch.with_lazy_bits(out, conj=self.conj, neg=self.neg)


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
        and output.is_conj() == source.is_conj()
        and output.is_neg() == source.is_neg()
    )
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


class Recording:
    """One captured graph: where its inputs must lie, and what it hands out.

    Made by `PartitionRunner`, which also checks that a call's inputs match before it calls `run`.
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
        slot: int = 0,
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
            slot: Which of the owner's pools it lies in.
        """
        self.birth = birth
        self.slot = slot
        self.last_used = 0
        self.replay: Callable[[], None] = graph.replay
        self._graph = graph
        self._copies = _by_dtype(placeholders)
        self._write_back = [(i, placeholders[i]) for i in mutated if i in placeholders]
        self.copied_bytes = sum(group.num_bytes for group in self._copies) + sum(
            _bytes(p.target) for _, p in self._write_back
        )
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
        self._escaping_at = tuple(n for n, _ in own if n not in private)
        self._escaping = tuple(tensor for n, tensor in own if n not in private)
        aliases = [(n, a) for n, a in enumerate(self._outputs) if isinstance(a, InputAlias)]
        views = [(n, a) for n, a in aliases if a.is_plain_view_of(staged[a.index])]
        self._views_at = tuple(n for n, _ in views)
        self._views = tuple(a.as_view() for _, a in views)
        self._other_aliases = [(n, a) for n, a in aliases if n not in self._views_at]
        self._copy_out: CopyOut | None = None

    def seal(self) -> None:
        """Note who holds the outputs when nothing was handed out yet; to be called once, last of all."""
        self.held = HeldStorages(self._escaping) if self._escaping else None

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
        fast.put(outputs, self._escaping_at, fast.aliases(self._escaping))
        fast.put(outputs, self._views_at, fast.views(args, self._views))
        for n, alias in self._other_aliases:
            outputs[n] = alias.of(args[alias.index])
        return outputs

    def copy_in(self, args: Sequence[Any]) -> None:
        """Copy the inputs that move into their placeholders."""
        for group in self._copies:
            group.copy_from(args)

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
        plan = self._copy_out
        if plan is None or plan.request != (positions, targets):
            plan = self._copy_out = CopyOut(self._outputs, positions, targets)
        plan.run(results)
        return plan.copied_bytes

    def close(self) -> None:
        """Free the graph; memory of outputs that somebody holds stays until they let go."""
        self._graph.reset()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _CopyIn:
    """Placeholders of one dtype, filled by one call."""

    __slots__ = ("_odd", "_positions", "_targets", "num_bytes")

    def __init__(self, members: Sequence[tuple[int, Placeholder]]) -> None:
        """Args: members: positions of inputs and their placeholders."""
        self._positions = [i for i, _ in members]
        self._targets = [p.target for _, p in members]
        self._odd = [(k, p) for k, (_, p) in enumerate(members) if p.flat or p.lazy]
        self.num_bytes = sum(map(_bytes, self._targets))

    def copy_from(self, args: Sequence[Any]) -> None:
        """Give the placeholders the values of a call's inputs."""
        sources = [args[i] for i in self._positions]
        for k, placeholder in self._odd:
            sources[k] = placeholder.source(sources[k])
        torch._foreach_copy_(self._targets, sources)


def _by_dtype(placeholders: Mapping[int, Placeholder]) -> list[_CopyIn]:
    groups: dict[torch.dtype, list[tuple[int, Placeholder]]] = {}
    for i, placeholder in sorted(placeholders.items()):
        if placeholder.target.numel():
            groups.setdefault(placeholder.target.dtype, []).append((i, placeholder))
    return [_CopyIn(members) for members in groups.values()]


class _SameDtype:
    """Outputs that one call copies."""

    __slots__ = ("layouts", "targets", "tensors")

    def __init__(self, members: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.targets = tuple(n for n, _ in members)
        self.tensors = tuple(tensor for _, tensor in members)
        self.layouts = tuple((tuple(t.size()), t.stride()) for t in self.tensors)


class CopyOut:
    """Copies some outputs of a recording into memory of their own.

    What never changes between replays (layouts, which outputs share memory) is worked out once.
    """

    def __init__(
        self, outputs: Sequence[Any], positions: tuple[int, ...], targets: tuple[int, ...]
    ) -> None:
        """Args: outputs: of a recording. positions, targets: as for `Recording.copy_out`."""
        self.request = (positions, targets)
        pairs = [(n, outputs[p]) for p, n in zip(positions, targets, strict=True)]
        own = [(n, t) for n, t in pairs if isinstance(t, torch.Tensor)]
        shared = Counter(t.untyped_storage().data_ptr() for _, t in own)
        self._whole = [
            (n, t)
            for n, t in own
            if t.numel() and (shared[t.untyped_storage().data_ptr()] > 1 or overlaps_itself(t))
        ]
        whole = {n for n, _ in self._whole}
        simple: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for n, tensor in own:
            if n not in whole:
                simple.setdefault(tensor.dtype, []).append((n, tensor))
        self._simple = [_SameDtype(members) for members in simple.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in self._whole}
        self.copied_bytes = sum(_bytes(t) for n, t in own if n not in whole)
        self.copied_bytes += sum(storage.nbytes() for storage in storages.values())

    def run(self, results: list[Any]) -> None:
        """Copy into `results`, on the current stream.

        **Lifetime:** the copies are the caller's; copies of outputs that share memory share memory.
        """
        for group in self._simple:
            fast.put(results, group.targets, fast.copies(group.tensors, group.layouts))
        storages: dict[int, torch.UntypedStorage] = {}
        for n, tensor in self._whole:
            source = tensor.untyped_storage()
            if source.data_ptr() not in storages:
                storages[source.data_ptr()] = source.clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage = storages[source.data_ptr()]
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            results[n] = _torch.with_lazy_bits(copy, conj=tensor.is_conj(), neg=tensor.is_neg())
