"""Results of callables: how they are made of tensors, and which values are alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class OutputStructure:
    """How a callable's result is made of the graph's outputs."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Those that are no tensors, in their places."""
    places: tuple[tuple[int, int], ...]
    """Places of tensors, and which one is there: one that is there several times is one."""
    plain: str = ""
    """"tensor" or "tuple", where the result is only that."""

    @classmethod
    def of(cls, result: Any) -> "OutputStructure":
        """The structure of a result; holds none of its tensors."""
        leaves, spec = pytree.tree_flatten(result)
        numbers: dict[int, int] = {}
        places = tuple(
            (i, numbers.setdefault(id(leaf), len(numbers)))
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        )
        plain = ""
        if isinstance(result, torch.Tensor):
            plain = "tensor"
        elif type(result) is tuple and len(numbers) == len(result) == len(leaves):
            plain = "tuple"
        kept = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(spec, kept, places, plain)

    def is_like(self, other: "OutputStructure") -> bool:
        """Tell whether tensors are in the same places among as many leaves; these and the nodes may be others."""
        return self.places == other.places and len(self.leaves) == len(other.leaves)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A result with these tensors."""
        if self.plain == "tensor":
            return tensors[0]
        if self.plain == "tuple":
            return tuple(tensors)
        leaves = list(self.leaves)
        for place, number in self.places:
            leaves[place] = tensors[number]
        return pytree.tree_unflatten(leaves, self.spec)


def firsts(objects: Sequence[Any]) -> list[int]:
    """For each one the first position of the same object."""
    known: dict[int, int] = {}
    return [known.setdefault(id(each), i) for i, each in enumerate(objects)]


def equal(a: object, b: object) -> bool:
    """Tell whether two values are alike for a graph, which has the first in it: numbers of one type and sign."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.nn.Module):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except Exception:  # what can't say whether it is equal isn't
        return False
