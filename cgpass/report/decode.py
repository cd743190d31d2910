"""Plain data from JSON as dataclasses."""

import dataclasses
import types
import typing
from typing import Any

from cgpass.errors import ReportError


def decoded(kind: Any, value: Any, where: str) -> Any:
    """`value` as a type that reports are made of.

    Raises:
        ReportError: It is none. Says where.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_of(kind, value, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else decoded(args[0], value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(decoded(args[0], each, f"{where}[{n}]") for n, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(key): decoded(args[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin or kind):
        name = getattr(origin or kind, "__name__", str(kind))
        raise ReportError(f"{where} is to be of type {name}, got {value!r:.60}")
    return value


def _dataclass_of(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ReportError(f"{where} is to be a dictionary, got {value!r:.60}")
    hints = typing.get_type_hints(kind)
    known = {
        name: decoded(hints[name], each, f"{where}.{name}")
        for name, each in value.items()
        if name in hints
    }
    try:
        return kind(**known)
    except TypeError as error:
        raise ReportError(f"{where} lacks something: {error}") from error
