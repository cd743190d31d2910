"""Inputs that a recorded callable writes where nobody said so.

Found by their version counters while it is recorded, and by their bits in plain calls: not every operator counts its
writes (the running statistics of batch norm, fused optimizers).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cgpass import _torch
from cgpass.errors import CaptureError
from cgpass.runtime.placeholders import overlaps_itself


def counting(value: Any) -> Any:
    """An alias of an input that counts writes, as tensors made in inference mode don't; what is no tensor as it is.

    **Lifetime:** the alias shares the input's storage, and its counter if it has one; not its sizes and strides.
    """
    if type(value) is not torch.Tensor:
        return value
    if value.is_inference():
        return _torch.on_storage(value.untyped_storage(), value)
    return value.detach()


def refuse_new_layouts(inputs: Sequence[Any], layouts: Sequence[tuple[Any, ...] | None]) -> None:
    """Refuse a recorded callable that gave its inputs another shape or other memory: a replay can't.

    Args:
        inputs: What it was called with.
        layouts: `places` of these inputs before the call.

    Raises:
        CaptureError: Names the first such input.
    """
    for i, (before, after) in enumerate(zip(layouts, places(inputs), strict=True)):
        if before != after:
            raise CaptureError(
                f"input {i} is given another shape, other strides or other memory in place (t_, unsqueeze_, resize_, "
                f".data = ...): that can't be captured; return the changed tensor instead"
            )


def places(inputs: Sequence[Any]) -> list[tuple[Any, ...] | None]:
    """How tensors are laid out and where they lie."""
    return [
        (tuple(x.size()), x.stride(), x.data_ptr()) if isinstance(x, torch.Tensor) else None
        for x in inputs
    ]


class Changes:
    """Bits of a plain call's inputs before it. **Lifetime:** copies of them live as long as this."""

    def __init__(self, inputs: Sequence[Any], positions: Iterable[int]) -> None:
        """Args: inputs: of the call. positions: tensors to compare; self-overlapping ones can't be written."""
        self._before = [
            (i, inputs[i], _bits(inputs[i]).clone())
            for i in positions
            if not overlaps_itself(inputs[i])
        ]

    def found(self) -> frozenset[int]:
        """Positions of the inputs that are different now; waits for the device."""
        return frozenset(
            i
            for i, value, before in self._before
            if value.numel() * value.element_size() != before.numel()
            or not torch.equal(_bits(value), before)
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


class Writes:
    """Version counters of a call's inputs before it."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        """Args: inputs: none made in inference mode."""
        self._before = [
            (i, value, value._version)
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
        ]

    def found(self) -> frozenset[int]:
        """Positions of the inputs that were written since."""
        return frozenset(i for i, value, version in self._before if value._version != version)


def shares_memory(args: Sequence[Any], written: Iterable[int]) -> bool:
    """Whether an input that is written shares memory with another: copies of the two would not."""
    written = set(written)
    if not written:
        return False
    storages = [
        (i, value.untyped_storage().data_ptr())
        for i, value in enumerate(args)
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    places = {address for i, address in storages if i in written}
    return sum(address in places for _, address in storages) > len(places)
