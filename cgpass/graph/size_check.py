"""Whether a call's sizes are such as was assumed of them when its graph was compiled."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch import fx

_Place = tuple[int, int | None]
"""An input, and the dimension of a tensor."""
_VERDICTS_KEPT: Final = 1024
"""Combinations of sizes whose verdict is remembered; then it starts over."""


class SymbolValues:
    """Values of symbols, from a call's inputs."""

    def __init__(self, places: Mapping[sympy.Symbol, _Place]) -> None:
        """Args: places: where each is."""
        self._places = dict(places)

    @classmethod
    def of(cls, gm: fx.GraphModule, symbols: Container[sympy.Symbol]) -> "SymbolValues":
        """Of a graph that is not compiled yet: compiling may replace symbols by numbers."""
        return cls({s: place for s, place in _bindings(gm).items() if s in symbols})

    def read(self, args: Sequence[Any]) -> tuple[int, ...]:
        """What each is."""
        return tuple(
            [args[at] if dim is None else args[at].shape[dim] for at, dim in self._places.values()]
        )

    def known(self, sizes: Sequence[int]) -> dict[sympy.Symbol, sympy.Integer]:
        """By symbol, what was read."""
        return dict(zip(self._places, map(sympy.Integer, sizes), strict=True))


class SizeCheck:
    """Assumptions about symbolic sizes, checked once per combination of sizes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """Find where each symbol can be read.

        Args:
            gm: The graph, before it is compiled: compiling may replace symbols by numbers.
        """
        self._places = _bindings(gm)
        self._values = SymbolValues({})
        self._assumed: tuple[sympy.Basic, ...] = ()
        self._verdicts: dict[tuple[int, ...], bool] = {}

    def assume(self, assumed: Iterable[sympy.Basic]) -> None:
        """Args: assumed: conditions that must hold."""
        self._assumed = tuple(dict.fromkeys(assumed))
        read = {symbol for condition in self._assumed for symbol in condition.free_symbols}
        self._values = SymbolValues({s: place for s, place in self._places.items() if s in read})

    @property
    def has_conditions(self) -> bool:
        """Whether there are sizes that don't hold."""
        return bool(self._assumed)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Whether everything assumed holds for a call's inputs; a symbol that can't be read holds nothing."""
        sizes = self._values.read(args)
        verdict = self._verdicts.get(sizes)
        if verdict is None:
            known = self._values.known(sizes)
            verdict = all(c.xreplace(known) == sympy.true for c in self._assumed)
            if len(self._verdicts) >= _VERDICTS_KEPT:
                self._verdicts.clear()
            self._verdicts[sizes] = verdict
        return verdict


def _bindings(gm: fx.GraphModule) -> dict[sympy.Symbol, _Place]:
    """Where symbols are: inputs that are one first."""
    found = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    places: dict[sympy.Symbol, _Place] = {}
    for at, value in enumerate(found):
        if (symbol := _symbol(value)) is not None:
            places.setdefault(symbol, (at, None))
    for at, value in enumerate(found):
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if (symbol := _symbol(size)) is not None:
                    places.setdefault(symbol, (at, dim))
    return places


def _symbol(value: object) -> sympy.Symbol | None:
    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None
