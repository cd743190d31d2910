"""What lists, tuples, dictionaries and sets hold, of any size."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

LIMIT = 10_000
"""Things in one container, at any depth, after which the search ends; what follows does not count."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
"""What is skipped."""
_ALWAYS = (torch.Tensor, torch.nn.Module)
"""What is found, however much there is of it."""
_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
CONTAINERS = tuple(_ITEMS)


def is_plain(kind: type) -> bool:
    """Whether values of a class hold nothing of interest."""
    return issubclass(kind, _PLAIN)


def contents(container: Any, seen: set[int] | None = None) -> tuple[list[Any], bool]:
    """What a container and those in it hold, but for plain values, and whether that is all.

    Args:
        container: One of `CONTAINERS`. No method that a class of its own has is run.
        seen: Containers that are not looked at, by identity; those that are looked at are added.
    """
    seen = set() if seen is None else seen
    found: list[Any] = []
    open_, left = deque([container]), LIMIT
    seen.add(id(container))
    while open_:
        each = open_.popleft()
        kinds = set(map(type, _items(each)))
        always = {kind for kind in kinds if issubclass(kind, _ALWAYS)}
        others = {kind for kind in kinds - always if not is_plain(kind)}
        if not others and not always:
            continue
        for item in _items(each):
            kind = type(item)
            if kind in always:
                found.append(item)
            elif kind in others:
                if left == 0:
                    return found, False
                left -= 1
                if not issubclass(kind, CONTAINERS):
                    found.append(item)
                elif id(item) not in seen:
                    seen.add(id(item))
                    open_.append(item)
    return found, True


def _items(container: Any) -> Iterable[Any]:
    return next(
        items(container) for kind, items in _ITEMS.items() if issubclass(type(container), kind)
    )
