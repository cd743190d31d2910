"""Arguments that are no tensors, as they were when a callable was recorded: a graph has their values in it."""

import enum
import types
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

_BY_IDENTITY = (
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
)
"""What is the same only if it is the same object; tensors are read where they lie."""
_OF_BYTES = ("shape", "dtype", "typecode", "format", "size", "mode")
"""What says how the bytes are read: of NumPy's arrays, `array.array`, `memoryview`, images."""
_MAX_DEPTH = 4


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A value as it was."""

    value: Any
    state: Any
    """What it was made of; None if it can't change."""
    text: str

    def is_of(self, value: Any) -> bool:
        """Whether a value is now what the recorded one was then."""
        if value is not self.value and not _equal(value, self.value):
            return False
        return self.state is None or _equal(self.state, _state(value))

    def __str__(self) -> str:
        return self.text


def snapshot(value: Any) -> Snapshot:
    """Keep what a value is."""
    return Snapshot(value, _state(value), short(value))


def short(value: object) -> str:
    """A value for messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _state(value: Any, depth: int = 0) -> Any:
    """What can change of a value without it becoming another object; None if nothing does."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, *_BY_IDENTITY)):
        return None
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, list | tuple):
        return [(item, _state(item, depth + 1)) for item in value]
    if isinstance(value, Mapping):
        return [(key, item, _state(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, AbstractSet):
        return frozenset(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "tobytes"):
        if getattr(getattr(value, "dtype", None), "hasobject", False):  # else pointers are compared
            return _state(value.tolist(), depth + 1)
        return ([str(getattr(value, name, None)) for name in _OF_BYTES], value.tobytes())
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held.update(getattr(value, "__dict__", {}))
    return _state(held, depth) if held else None


def _equal(a: object, b: object) -> bool:
    """Whether two values are alike for a graph: zeros of one sign, and NaN is NaN."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, _BY_IDENTITY):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if hasattr(a, "tobytes"):
        return _state(a) == _state(b)
    try:
        return bool(a == b)
    except Exception:  # what can't say whether it is equal isn't
        return False
