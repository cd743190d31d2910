"""Names that functions assign when they run: globals, names of enclosing functions, attributes of classes."""

import dis
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Name:
    """Where a function leaves something by name."""

    what: str
    """What to call it."""
    value: Callable[[], Any]
    """What is there now; None if nothing is."""


def assigned(found: Iterable[Any]) -> Iterator[Name]:
    """Names that functions and methods assign outside of themselves, and attributes of classes that are among these.

    Args:
        found: What a callable reaches, of nobody's library. None of it is run.
    """
    for value in found:
        function = value.__func__ if isinstance(value, types.MethodType) else value
        if isinstance(function, types.FunctionType):
            yield from _of_function(function)
        elif isinstance(value, type):
            yield _of_class(value)


def _of_function(function: types.FunctionType) -> Iterator[Name]:
    stored = set(_stored(function.__code__))
    known = function.__globals__
    for name in sorted(name for op, name in stored if op == "STORE_GLOBAL"):
        yield Name(f"the global {name!r}", lambda name=name: known.get(name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if ("STORE_DEREF", name) in stored:
            yield Name(f"the nonlocal {name!r}", lambda cell=cell: content(cell))


def _of_class(kind: type) -> Name:
    return Name(f"an attribute of class {kind.__name__}", lambda: dict(vars(kind)))


def _stored(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Instructions and names, in a function and in those that are written in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            yield instruction.opname, str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _stored(constant)


def content(cell: types.CellType) -> Any:
    """What is in a cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
