"""Positions and counters that calls move on, put back before each call.

Note [Every call is the one that would come next]
    `explain` calls a function some twenty times. A position that went on would leave its cache in the end, which on CUDA
    is the end of the process's use of the device. So small tensors of integers that calls write in place are put back.
    Bytes and booleans are flags: that something was set up in the first call, say.

    Models rely on numbers that agree: a length that is a Python number beside one that is a tensor, a mask as long as its
    cache. Where a call leaves anything else behind that differs (another Python number, another tensor of integers, a
    tensor of another size, something in the place of None), nothing is put back after it, and the next call finds what it
    would find in the user's loop.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from cgpass.report.reached import Called, bytes_covered, has_storage, is_a, read_by_name, values_in
from cgpass.runtime.inputs import bytes_of

MOST_BYTES: Final = 2**20
"""Of a tensor that counts; integers that take more are tables."""
_ATOMS: Final = (bool, int, str, bytes, type(None))


class _Number:
    """A tensor that counts, as it is before a call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._contents = _bytes(tensor).clone()

    def put_back(self, tensor: torch.Tensor) -> None:
        _bytes(tensor).copy_(self._contents)


class Positions:
    """What calls count, in everything that they reach. See Note [Every call is the one that would come next]."""

    def __init__(self, called: Called, attributes: Callable[[], Iterable[Any]]) -> None:
        """Look at nothing yet.

        Args:
            called: The function and its arguments.
            attributes: Gives what modules have now: names and values of parameters, buffers, attributes of their own.
        """
        self._called = called
        self._attributes = attributes
        self._kinds: list[Any] | None = None
        """Of all that there is before a call."""
        self._numbers: list[_Number] = []

    def rewind(self) -> None:
        """Put numbers back that the last call wrote, or remember those of now. To be called before each call."""
        called = self._called
        roots, seen = (*self._attributes(), *called.objects, *read_by_name(called.fn)), set[int]()
        values = [each for root in roots for each in values_in(root, seen)]
        kinds, found = list(map(_kind, values)), list(filter(counts, values))
        with torch.no_grad():
            if kinds != self._kinds:
                self._kinds, self._numbers = kinds, list(map(_Number, found))
                return
            for number, tensor in zip(self._numbers, found, strict=True):
                number.put_back(tensor)


def _kind(value: Any) -> Any:
    """What of a value has to be the same after a call; the value itself may be dropped meanwhile."""
    if is_a(value, torch.Tensor):
        size = None if value.is_nested else tuple(value.size())
        kind = type(value), value.dtype, value.layout, value.device, size
        return (*kind, id(value), *_place(value)) if counts(value) else kind
    if type(value) in (float, complex):
        return repr(value)  # no number is itself in every case
    if type(value) in _ATOMS:
        return type(value), value
    return type(value), len(value) if type(value) in (list, tuple, dict, set) else None


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how; nothing of it is held."""
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.stride()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    start, end = bytes_covered(tensor)
    return bytes_of(tensor.untyped_storage())[start:end]


def counts(value: Any) -> bool:
    """Whether something is a tensor of integers, and not too many: how often, or up to where."""
    if not is_a(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return False
    if not has_storage(value):
        return False
    start, end = bytes_covered(value)
    return end - start <= MOST_BYTES and end <= value.untyped_storage().nbytes()
