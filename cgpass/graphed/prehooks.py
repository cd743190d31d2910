"""Attributes that hooks of a module compute before each of its runs, and that its `forward` reads.

Those of `torch.nn.utils.weight_norm` do so: what such a hook makes is part of the graph. What hooks keep for others, as
inputs for statistics, is not.
"""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from cgpass.graphed.reach import add_names, defined, is_library


def written_by_hooks(module: torch.nn.Module) -> set[str]:
    """Names of attributes that a module's forward-pre-hooks set, as far as their code says so.

    Args:
        module: Whose; no hook of it is run.
    """
    found: set[str] = set()
    for hook in module._forward_pre_hooks.values():
        found.update(_set_by(hook))
    return found


def _set_by(hook: Any) -> Iterator[str]:
    """Attributes that it names as set: `m.weight = ...`, `setattr(m, "weight", ...)`, `setattr(m, self.name, ...)`."""
    function, holder = hook, []
    if isinstance(hook, functools.partial):
        function, holder = hook.func, [*hook.args, *hook.keywords.values()]
    if isinstance(function, types.MethodType):
        function, holder = function.__func__, [*holder, *_own(function.__self__)]
    elif not isinstance(function, types.FunctionType):
        function, holder = type(function).__call__, [*holder, *_own(function)]
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")
    if "setattr" in code.co_names:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        values = (*code.co_consts, *cells, *(function.__defaults__ or ()), *holder)
        yield from (value for value in values if isinstance(value, str))


def read_by_forward(module: torch.nn.Module) -> set[str]:
    """Names of attributes that a module's `forward` reads, of whatever object, as far as its code says so.

    Methods and properties that it names are looked into, and functions that are no library's.

    Args:
        module: Whose; nothing of it is run.
    """
    found: set[str] = set()
    open_: list[Any] = [module.forward]
    seen: set[int] = set()
    while open_:
        function = open_.pop()
        function = getattr(function, "ungraphed", function)
        if isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        named: set[str] = set()
        read: set[str] = set()
        add_names(function.__code__, named, read)
        if "getattr" in named:
            read.update(each for each in function.__code__.co_consts if isinstance(each, str))
        found |= read
        open_ += defined(type(module), module, frozenset(read - vars(torch.nn.Module).keys()))
        cells = map(_content, function.__closure__ or ())
        helpers = [*(function.__globals__.get(name) for name in named), *cells]
        open_ += [h for h in helpers if not is_library(getattr(h, "__module__", None))]
    return found


def _own(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
