"""Modules that reduce or gather by hooks of their own, found wherever a callable may reach them."""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cgpass.errors import GraphedArgumentError

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.",
    "DataParallel": "torch.nn.",
    "FullyShardedDataParallel": "torch.distributed.",
    "FSDPModule": "torch.distributed.",
}
"""Names of classes, and where these come from."""
_MAX_STEPS = 8
_MAX_SEEN = 10_000
_NO_STEPS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.Tensor,
)
"""What leads nowhere."""
_Names = frozenset[str]
"""What the code names from which something was reached."""


def refuse_wrappers(
    name: str, fn: Callable[..., Any], modules: Iterable[torch.nn.Module] = ()
) -> None:
    """Have nothing recorded whose backward does more than its graph says.

    Args:
        name: Of the callable.
        fn: The callable.
        modules: What it reaches besides.

    Raises:
        GraphedArgumentError: It is or reaches a wrapper such as DistributedDataParallel.
    """
    seen: set[torch.nn.Module] = set()
    for top in (*modules, *_modules_reached(fn)):
        for path, module in top.named_modules(memo=seen):
            bases = {base.__name__: base.__module__ for base in type(module).__mro__}
            found = [
                kind for kind, home in _WRAPPERS.items() if bases.get(kind, "").startswith(home)
            ]
            if found:
                where = f" at {path!r}" if path else ""
                raise GraphedArgumentError(
                    f"make_graphed_callables: {name} is or reaches a module that is already wrapped, a "
                    f"{type(module).__name__}{where}, whose hooks ({found[0]}) would not run on a replay, so that gradients "
                    "would not be reduced. Record the module inside, naming it by itself, then wrap."
                )


def _modules_reached(fn: Callable[..., Any]) -> Iterator[torch.nn.Module]:
    """Modules that a callable may call, as its code names what leads there; calls nothing."""
    open_: deque[tuple[Any, _Names, int]] = deque([(fn, frozenset(), 0)])
    seen: dict[tuple[int, int, _Names], Any] = {}
    while open_ and len(seen) < _MAX_SEEN:
        value, names, steps = open_.popleft()
        if isinstance(value, _NO_STEPS) or steps > _MAX_STEPS:
            continue
        bound = isinstance(value, types.MethodType)  # a new object each time
        parts = (value.__func__, value.__self__) if bound else (value, None)
        key = (id(parts[0]), id(parts[1]), names)
        if key in seen:
            continue
        seen[key] = value  # which must not be another one's address later
        if isinstance(value, torch.nn.Module):
            yield value
        open_.extend((part, found, steps + 1) for part, found in _reached(value, names))


def _reached(value: Any, names: _Names) -> Iterator[tuple[Any, _Names]]:
    """One step from a value, and the names in the code that makes it."""
    if isinstance(value, functools.partial):
        yield from ((part, names) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield value.__func__, names
        yield value.__self__, _names_in(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _named_by(value)
    elif isinstance(value, list | tuple):
        yield from ((part, names) for part in value)
    elif isinstance(value, dict):
        yield from ((part, names) for part in value.values())
    elif isinstance(value, torch.nn.Module):
        for inner in value.modules():
            named = names | _names_in(type(inner).forward)
            yield from ((vars(inner)[name], named) for name in named if name in vars(inner))
    else:
        attributes = list(_attributes(value, names))
        yield from attributes or _attributes(value, _names_in(_of_class(value, "__call__")))


def _named_by(function: types.FunctionType) -> Iterator[tuple[Any, _Names]]:
    """What a function finds by name: in its closure, its defaults, its module; nothing for torch's own."""
    if function.__module__ is None or f"{function.__module__}.".startswith("torch."):
        wrapped = getattr(function, "__wrapped__", None)
        names = frozenset()
        found = [] if wrapped is None else [wrapped]
    else:
        names = _names_in(function)
        found = [function.__globals__[name] for name in names if name in function.__globals__]
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    yield from ((part, names) for part in found)


def _attributes(value: Any, names: _Names) -> Iterator[tuple[Any, _Names]]:
    """Attributes and methods of an object that the code names; the methods with what they name of it."""
    held = getattr(value, "__dict__", {})
    for name in names:
        if name in held:
            yield held[name], names
        method = _of_class(value, name)
        if isinstance(method, types.FunctionType):
            yield types.MethodType(method, value), names


def _of_class(value: Any, name: str) -> Any:
    return next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)


def _names_in(function: Any) -> _Names:
    """Names in a function's code and in that of functions which it makes."""
    function = getattr(function, "__func__", function)
    open_ = [getattr(function, "__code__", None)]
    names: set[str] = set()
    while open_:
        code = open_.pop()
        if code is not None:
            names.update(code.co_names)
            open_ += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(names)
