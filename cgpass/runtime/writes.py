"""Inputs that a recorded callable writes where nobody said so.

While it is recorded they are found by what operators say that they write, and by version counters, which kernels of
compiled functions advance; not every operator does (the running statistics of batch norm, fused optimizers). In plain
calls they are found by their bits, for what no operator writes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import CaptureError
from cgpass.runtime.inputs import overlaps_itself


def counting(value: Any) -> Any:
    """An alias of an input that counts writes, as tensors made in inference mode don't; what is no tensor as it is.

    **Lifetime:** the alias shares the input's storage, and its counter if it has one; not its sizes and strides.
    """
    if isinstance(value, torch.Tensor) and value.is_inference():
        return torch_private.on_storage(value.untyped_storage(), value)
    return value.detach() if type(value) is torch.Tensor else value


class Changes:
    """Bits of a plain call's inputs before it. **Lifetime:** copies of them live as long as this."""

    def __init__(self, inputs: Sequence[Any], positions: Iterable[int]) -> None:
        self._before = [
            (i, inputs[i], bits(inputs[i]).clone())
            for i in positions
            if not overlaps_itself(inputs[i])
        ]

    def found(self) -> frozenset[int]:
        """Positions of the inputs that are different now; waits for the device."""
        return frozenset(
            i
            for i, value, before in self._before
            if value.nbytes != before.numel() or not torch.equal(bits(value), before)
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in a row: a view, or a copy where it isn't contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.size()), tensor.stride(), tensor.data_ptr()


_STATISTICS = ("running_mean", "running_var")
_WRITE_STATISTICS = {
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
    "aten::batch_norm_update_stats": None,
    "aten::batch_norm_gather_stats": None,
    "aten::batch_norm_gather_stats_with_counts": None,
}
"""Operators that write running statistics and don't say so, and the argument that tells whether they do.

Source: aten/src/ATen/native/native_functions.yaml, 2.11 to 2.15.
"""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that a call of an operator may write: as its schema says, where that is true; all if it has none."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return tensors_in((args, kwargs))
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    writes = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    if schema.name in _WRITE_STATISTICS:
        switch = _WRITE_STATISTICS[schema.name]
        writes += _STATISTICS if switch is None or named.get(switch) else ()
    elif schema.name.startswith("c10d::") and schema.name.endswith("_"):
        writes += [name for name in named if not name.startswith("input")]
    return tensors_in([named.get(name) for name in writes])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Watched(torch_private.TorchDispatchMode):
    """Finds which inputs of a callable are written inside, and what operators use there that is no input.

    No input may be made in inference mode: see `counting`.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.said: set[int] = set()
        """Positions of the inputs that operators say they write."""
        self.wrote: set[int] = set()
        """Addresses of the storages that they say they write."""
        tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        self._before = [(i, x, x._version, _place(x)) for i, x in tensors]
        self.outside: dict[int, torch.UntypedStorage] = {}
        """Storages that operators were given and that none of them made, nor an input has: closures', by address. Also
        what was made beside operators. **Lifetime:** held, since the graph reads them even if the callable drops them."""
        self._places = [(i, *extent(value)) for i, value in enumerate(inputs) if has_place(value)]
        self._inside = {value.untyped_storage().data_ptr() for value in filter(has_place, inputs)}

    def counted(self) -> frozenset[int]:
        """Positions of the inputs whose version counters tell that they were written."""
        return frozenset(i for i, value, version, _ in self._before if value._version != version)

    def written(self) -> frozenset[int]:
        """Positions of all inputs that were written."""
        return self.counted() | self.said

    def refuse_new_layouts(self) -> None:
        """Raise `CaptureError` for an input that has another shape or other memory by now: a replay can't give it."""
        for i, value, _, place in self._before:
            if _place(value) != place:
                raise CaptureError(
                    f"input {i} is given another shape, other strides or other memory in place (t_, unsqueeze_, resize_, "
                    f".data = ...): that can't be captured; return the changed tensor instead"
                )

    def unknown(self, tree: Any) -> dict[int, torch.UntypedStorage]:
        """Storages of tensors that no operator had anything to do with, nor are inputs, by address."""
        storages = (tensor.untyped_storage() for tensor in filter(has_place, tensors_in(tree)))
        found = {storage.data_ptr(): storage for storage in storages}
        return {a: s for a, s in found.items() if a not in self._inside and a not in self.outside}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside stay compiled: their writes advance version counters."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch_private.see_to_calls(types):
            return NotImplemented
        kwargs = kwargs or {}
        if hasattr(func, "_schema") or "mutation" in str(func):  # what Triton kernels write
            for tensor in filter(has_place, written_by(func, args, kwargs)):
                begin, end = extent(tensor)
                self.wrote.add(tensor.untyped_storage().data_ptr())
                self.said.update(
                    i for i, first, last in self._places if begin < last and first < end
                )
        # what is lifted was made just before, beside operators
        if getattr(func, "__name__", "") != "lift_fresh.default":
            self.outside.update(self.unknown((args, kwargs)))
        out = func(*args, **kwargs)
        self._inside.update(self.unknown(out))
        return out


def has_place(value: Any) -> bool:
    """Tell whether a value is a tensor in plain memory, and has elements.

    Zeros that forward-mode AD makes have no memory.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or torch_private.is_zero_tensor(value):
        return False
    return value.layout is torch.strided and value.numel() > 0 and not value.is_meta


def copied(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Inputs, with copies of all that shares memory with those at some positions."""
    places = [value.untyped_storage()._cdata if has_place(value) else None for value in args]
    clones = {places[i]: args[i].untyped_storage().clone() for i in positions if places[i]}
    return [
        torch_private.on_storage(clones[place], value) if place in clones else value
        for place, value in zip(places, args, strict=True)
    ]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's memory begins and ends."""
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (1 + reach) * tensor.element_size()
