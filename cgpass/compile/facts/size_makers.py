"""Which operator made a size that depends on data."""

import weakref
from collections.abc import Mapping
from typing import Final

import sympy
from torch import fx

from cgpass.compile.facts.lines import user_line
from cgpass.compile.facts.values import unbacked_symbols

_KNOWN: Final[weakref.WeakKeyDictionary[fx.Graph, tuple[int, Mapping[sympy.Symbol, fx.Node]]]] = (
    weakref.WeakKeyDictionary()
)
"""Of each graph that was asked about, with how many nodes it had: every node of it is asked about in turn."""


def size_maker(node: fx.Node, symbol: sympy.Symbol) -> fx.Node | None:
    """The node of the same graph that made a size; None if it came in as an input."""
    graph = node.graph
    known = _KNOWN.get(graph)
    if known is None or known[0] != len(graph.nodes):
        known = _KNOWN[graph] = len(graph.nodes), _makers(graph)
    maker = known[1].get(symbol)
    return None if maker is None or maker.op != "call_function" else maker


def _makers(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    makers: dict[sympy.Symbol, fx.Node] = {}
    for node in graph.nodes:
        for symbol in unbacked_symbols(node):
            makers.setdefault(symbol, node)
    return makers


def place_of(node: fx.Node) -> str:
    """Where a node is from, without the code there: ` at model.py:41 in forward`, or nothing."""
    line = user_line(node)
    return "" if line is None else f" at {line.partition(': ')[0]}"
