"""A module's shallow copy gets what is set on the module later."""

import functools
import operator
import types
from typing import Any

import torch

_OWN = {
    *vars(torch.nn.Module()),
    *("forward", "graphed", "reset", "close", "backward_dw"),
    *("__reduce_ex__", "__deepcopy__", "_compiled_call_impl"),
}
"""What a copy shares with its original, or has of its own; its hooks are its own, too."""


class Attributes:
    """Those of a module that was copied, as they were when they were last looked at."""

    def __init__(self, original: torch.nn.Module) -> None:
        """Args: original: what was copied just now."""
        self.original = original
        self._seen = _attributes(original)

    def follow(self, copy: torch.nn.Module) -> None:
        """Have a copy get what was set on its original, or deleted there, since the last time.

        Args:
            copy: Of which what was set on itself stays, until the same is set on the original.
        """
        if torch.compiler.is_compiling():
            return
        before, now = self._seen, _attributes(self.original)
        own = vars(copy)
        for name, value in now.items():
            if name not in before or before[name] is not value:
                own[name] = rebound(value, self.original, copy)
        for name in before.keys() - now.keys():
            own.pop(name, None)
        self._seen = now


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def rebound(value: Any, original: torch.nn.Module, copy: torch.nn.Module) -> Any:
    """What a method of a module, or a `partial` with that module in it, is for a copy of the module."""
    if value is original:
        return copy
    if isinstance(value, types.MethodType) and value.__self__ is original:
        return types.MethodType(value.__func__, copy)
    if not isinstance(value, functools.partial):
        return value
    parts = (value.func, *value.args, *value.keywords.values())
    func, *others = [rebound(part, original, copy) for part in parts]
    if all(map(operator.is_, parts, (func, *others))):
        return value
    positional, named = others[: len(value.args)], others[len(value.args) :]
    new = functools.partial(func, *positional, **dict(zip(value.keywords, named, strict=True)))
    vars(new).update(vars(value))
    return new
