"""Inputs that a recorded callable writes where nobody said so: found by their version counters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cgpass import _torch


def counting(value: Any) -> Any:
    """An input as it is, or an alias that counts writes: tensors made in inference mode don't.

    **Lifetime:** the alias shares the input's storage.
    """
    if isinstance(value, torch.Tensor) and value.is_inference():
        return _torch.on_storage(value.untyped_storage(), value)
    return value


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
