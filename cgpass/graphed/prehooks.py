"""Attributes that hooks of a module compute before each of its runs, as those of `torch.nn.utils.weight_norm` do."""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch


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


def _own(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
