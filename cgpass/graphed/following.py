"""A module's shallow copy gets what is set on the module later."""

import functools
import operator
import types
from typing import Any

import torch

_OWN = {
    *vars(torch.nn.Module()),
    *("forward", "graphed", "reset", "close", "backward_dw"),
    *("__reduce_ex__", "__deepcopy__", "_compiled_call_impl", "state_dict"),
}
"""What a copy shares with its original, or has of its own; its hooks are its own, too."""
_NOTHING = object()


class Attributes:
    """Those of a module that was copied, as they were when they were last looked at.

    Nobody tells when one is set. So they are looked at where a copy runs without a graph, is copied or gives its state.
    """

    def __init__(self, original: torch.nn.Module, copy: torch.nn.Module) -> None:
        """Args: original: what was copied just now. copy: the copy, which is not held."""
        self.original = original
        self._seen = _attributes(original)
        self._given = _attributes(copy)
        self._forward = vars(original).get("forward")

    def follow(self, copy: torch.nn.Module) -> None:
        """Have a copy get what was set on its original, or deleted there, since the last time.

        Args:
            copy: Of which what was set on itself since then stays; and what was before, until the same is set on the
                original.
        """
        if torch.compiler.is_compiling():
            return
        before, now, own = self._seen, _attributes(self.original), vars(copy)
        changed = [
            name
            for name in now | before
            if now.get(name, _NOTHING) is not before.get(name, _NOTHING)
            and own.get(name, _NOTHING) is self._given.get(name, _NOTHING)
        ]
        for name in changed:
            if name in now:
                own[name] = rebound(now[name], self.original, copy)
            else:
                own.pop(name, None)
        self._seen, self._given = now, _attributes(copy)

    def new_forward(self, copy: torch.nn.Module) -> Any:
        """The `forward` that was set on the original since it was copied, for the copy; else None."""
        forward = vars(self.original).get("forward")
        if forward is self._forward or forward is None:
            return None
        return rebound(getattr(forward, "ungraphed", forward), self.original, copy)


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
