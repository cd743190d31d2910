"""Which module holds a tensor, as which of its parameters and buffers."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch

Holder = tuple["weakref.ref[torch.nn.Module]", str] | int
"""A module and its name for a tensor, or the `id` of a tensor that no module holds."""

_held: dict[int, tuple["weakref.ref[torch.nn.Module]", str]] = {}
"""By the `id`s of parameters and buffers of all modules, as of some time ago."""


def holders_of(tensors: Sequence[torch.Tensor]) -> tuple[Holder, ...]:
    """Who holds tensors: a module that gets another tensor for a parameter is the same holder, another module is not."""
    if not all(map(_is_held, tensors)):
        _held.clear()
        for each in gc.get_objects():
            if issubclass(type(each), torch.nn.Module):
                ref = weakref.ref(each)
                for own in _tensors_of(each):
                    for name, tensor in own.items():
                        _held.setdefault(id(tensor), (ref, name))
    return tuple(_held[id(tensor)] if _is_held(tensor) else id(tensor) for tensor in tensors)


def _is_held(tensor: torch.Tensor) -> bool:
    if id(tensor) not in _held:
        return False
    ref, name = _held[id(tensor)]
    module = ref()
    return module is not None and any(own.get(name) is tensor for own in _tensors_of(module))


def _tensors_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    found = [vars(module).get(name) for name in ("_parameters", "_buffers")]
    return [own for own in found if isinstance(own, dict)]
