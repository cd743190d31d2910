"""`ModuleHooks`: the hooks that modules have, and a `forward` of their own."""

import weakref
from array import array
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from cgpass.runtime import fast

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_WAYS = ("_with_kwargs", "_always_called")
"""How a hook may be called: torch keeps the keys of such in dictionaries of these endings."""

Entries = tuple[list[Any], list[str], list[Any], list[Any], bytes]
"""What `fast.unchanged` takes."""
NEVER: Entries = ([{}], [""], [None], [], b"")
"""What it says False for."""

_Runs = list[tuple[Any, tuple[Any, ...]]]
"""Hooks in the order in which they run, with how they do, and last the `forward`; or weak references to them."""


class ModuleHooks:
    """Hooks of modules and a `forward` of their own, as they were, and where to look whether they still are.

    **Lifetime:** holds the modules' attributes, and no hook once `changed` saw that it is gone.
    """

    def __init__(self) -> None:
        """No module is looked at yet."""
        self._places: list[tuple[str, dict[str, Any]]] = []
        self._before: list[_Runs] = []
        self.entries: Entries = NEVER

    def watch(self, module: torch.nn.Module, path: str) -> None:
        """Look at a module's, too. To be noted afterwards."""
        self._places.append((path, module.__dict__))

    def note(self) -> None:
        """Take those of now for what they were."""
        self._before = [
            [(_weakly(run), how) for run, how in _runs(attributes)]
            for _, attributes in self._places
        ]
        self._look()

    def _look(self) -> None:
        dicts, keys, values, holders = [], [], [], []
        for _, attributes in self._places:
            kept = [attributes.get(kind, ...) for kind in _KINDS]
            dicts += [attributes] * (len(kept) + 1)
            keys += [*_KINDS, "forward"]
            values += [*kept, attributes.get("forward", ...)]
            for holder in kept:
                if holder is not ...:
                    holders.append(holder)
                    dicts += [holder] * len(holder)
                    keys += holder.keys()
                    values += holder.values()
        self.entries = (dicts, keys, values, holders, array("q", map(len, holders)).tobytes())

    def changed(self) -> list[str]:
        """Paths of the modules that run others, or in another order.

        What was set again, or is kept elsewhere than it was, is no other: `entries` then say where that is.
        """
        if fast.unchanged(*self.entries):
            return []
        pairs = zip(self._places, self._before, strict=True)
        found = [path for (path, now), before in pairs if not _are(before, _runs(now))]
        if found:
            self.entries = NEVER
        else:
            self._look()
        return found


def _runs(attributes: dict[str, Any]) -> _Runs:
    """What runs in a module, by its attributes."""
    return [*_hooks(attributes), (_own_forward(attributes), ())]


def _hooks(attributes: dict[str, Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for kind in _KINDS:
        for key, hook in attributes.get(kind, {}).items():
            ways = [key in attributes.get(f"{kind}{way}", ()) for way in _WAYS]
            yield hook, (kind, *ways)


def _own_forward(attributes: dict[str, Any]) -> Any:
    """A module's own `forward` under those that were graphed by hand; `...` for its class's."""
    found = attributes.get("forward", ...)
    while hasattr(type(found), "beneath"):
        found = found.beneath
    if not isinstance(found, MethodType):
        return found
    module, function = found.__self__, found.__func__
    is_its_class = function is getattr(type(module), "forward", None)
    return ... if is_its_class and getattr(module, "__dict__", None) is attributes else found


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:  # there are none to it
        return lambda: value


def _are(before: _Runs, now: _Runs) -> bool:
    if [how for _, how in before] != [how for _, how in now]:
        return False
    return all(_is(ref(), run) for (ref, _), (run, _) in zip(before, now, strict=True))


def _is(before: Any, now: Any) -> bool:
    """Whether it is the same; methods are made anew whenever they are asked for."""
    both_methods = isinstance(before, MethodType) and isinstance(now, MethodType)
    return before is now or (both_methods and before == now)
