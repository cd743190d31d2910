"""Positions and counters that calls move on, put back before each call.

Note [Every call is the one that would come next]
    `explain` calls a function some twenty times. A position that went on would leave its cache in the end, which on CUDA
    is the end of the process's use of the device. So small tensors of integers are put back: those that are written in
    place, where they are; in the place of those that a module replaces, new ones, for in the user's loop they would be
    new in each call, too. Bytes and booleans are flags: that something was set up in the first call, say.

    Models rely on numbers that agree: a length that is a Python number beside one that is a tensor, a mask as long as its
    cache. Where a call leaves anything else behind that differs (another Python number, a tensor of another size, something
    in the place of None), nothing is put back after it, and the next call finds what it would find in the user's loop.
"""

import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from cgpass.graphed.reach import is_library
from cgpass.report.reached import Called, bytes_covered, has_storage, read_by_name
from cgpass.runtime.placeholders import bytes_of

MOST_BYTES: Final = 2**20
"""Of a tensor that counts; integers that take more are tables."""
MOST_VALUES: Final = 20_000
"""That are looked at of what one module, object or function holds."""
CONTAINERS: Final = (list, dict, set, deque, OrderedDict, defaultdict)
"""Types, but no subclasses of others', that are looked into; tuples are, too."""
_NUMBERS: Final = (bool, int, float, complex, str, bytes, type(None))
_CODE: Final = (
    *(torch.nn.Module, torch.Tensor, type, types.ModuleType),
    *(types.FunctionType, types.MethodType),
)
"""Modules are looked at as such; the others hold nothing that a call moves on."""

Entry = tuple[dict[str, Any], str]
"""A dictionary of a module's, and a name in it."""


@dataclass
class _Found:
    """A tensor that counts, and which entry it is."""

    tensor: torch.Tensor
    entry: Entry | None
    """None where it is in something that nothing is put into."""


class _Number:
    """A tensor that counts, as it is before a call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._identity = id(tensor)
        self._place = _place(tensor)
        self._contents = _bytes(tensor).clone()
        self._values = tensor.detach().clone()

    def may_be_put_back(self, found: _Found) -> bool:
        """Whether it is where it was, or may be replaced."""
        return found.entry is not None or self._is_in_place(found.tensor)

    def put_back(self, found: _Found) -> None:
        tensor = found.tensor
        if self._is_in_place(tensor):
            _bytes(tensor).copy_(self._contents)
        elif id(tensor) == self._identity:
            tensor.data = self._values.clone()
        else:
            assert found.entry is not None
            holder, name = found.entry
            holder[name] = self._values.clone()

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        return id(tensor) == self._identity and _place(tensor) == self._place


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how; nothing of it is held."""
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.stride()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    start, end = bytes_covered(tensor)
    return bytes_of(tensor.untyped_storage())[start:end]


class Positions:
    """What calls count, in everything that they reach. See Note [Every call is the one that would come next]."""

    def __init__(self, called: Called, entries: Callable[[], Iterable[Entry]]) -> None:
        """Look at nothing yet.

        Args:
            called: The function and its arguments.
            entries: Gives what modules have now: parameters, buffers, attributes of their own.
        """
        self._called = called
        self._entries = entries
        objects = (each for each in (*called.given, *called.values) if _is_object(each))
        self._objects = list({id(each): each for each in objects}.values())
        self._kinds: list[Any] | None = None
        """Of all that there is before a call."""
        self._numbers: list[_Number] = []

    def rewind(self) -> None:
        """Put numbers back that the last call wrote, or remember those of now. To be called before each call."""
        kinds: list[Any] = []
        found = list(self._look(kinds))
        if kinds == self._kinds and all(
            number.may_be_put_back(each) for number, each in zip(self._numbers, found, strict=True)
        ):
            with torch.no_grad():
                for number, each in zip(self._numbers, found, strict=True):
                    number.put_back(each)
        else:
            self._kinds = kinds
            with torch.no_grad():
                self._numbers = [_Number(each.tensor) for each in found]

    def _look(self, kinds: list[Any]) -> Iterator[_Found]:
        """Tensors that count; `kinds` is given what has to be the same after a call."""
        for entry in self._entries():
            holder, name = entry
            kinds.append(name)
            yield from _look_into(holder[name], kinds, entry)
        own = [vars(each) for each in self._objects]
        yield from _look_into([*own, *read_by_name(self._called.fn)], kinds)
        yield from _look_into([*self._called.arguments], kinds)


def _is_object(value: Any) -> bool:
    """Whether something is an object of a user's own class, with attributes."""
    is_own = not isinstance(value, _CODE) and not is_library(type(value).__module__)
    return is_own and type(getattr(value, "__dict__", None)) is dict


def _look_into(value: Any, kinds: list[Any], entry: Entry | None = None) -> Iterator[_Found]:
    for each in itertools.islice(_values(value), MOST_VALUES):
        kinds.append(_kind(each))
        if isinstance(each, torch.Tensor) and counts(each):
            yield _Found(each, entry if each is value else None)


def _values(value: Any) -> Iterator[Any]:
    """A value; of a container, what it holds, of a tensor that wraps others, those, too."""
    open_, seen = [value], set[int]()
    while open_:
        each = open_.pop()
        yield each
        if isinstance(each, torch.Tensor) and hasattr(each, "__tensor_flatten__"):
            names, _ = each.__tensor_flatten__()
            open_ += [getattr(each, inner) for inner in names]
        if type(each) not in (tuple, *CONTAINERS) or id(each) in seen:
            continue
        seen.add(id(each))
        open_ += [*each.keys(), *each.values()] if isinstance(each, dict) else each


def _kind(value: Any) -> Any:
    """What of a value has to be the same after a call; the value itself may be dropped meanwhile."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.layout, value.device, tuple(value.size())
    if type(value) in _NUMBERS:
        return type(value), repr(value)
    return type(value), len(value) if type(value) in (tuple, *CONTAINERS) else None


def counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor has integers, and not too many: how often, or up to where."""
    if tensor.dtype not in (torch.int32, torch.int64) or not has_storage(tensor):
        return False
    start, end = bytes_covered(tensor)
    return end - start <= MOST_BYTES
