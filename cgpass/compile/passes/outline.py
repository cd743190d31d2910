"""Turn each partition of a tagged graph into a graph of its own."""

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import is_argument
from cgpass.compile.facts.partition_tag import KEY, PartitionTag, get_tag
from cgpass.compile.passes.base import graph_text


@dataclass(frozen=True)
class Part:
    """One partition as a graph of its own."""

    tag: PartitionTag
    gm: fx.GraphModule
    """Takes every backed symbol that its values mention, then its inputs in the order of their first use; returns a tuple."""
    inputs: tuple[fx.Node, ...]
    """Values of the whole graph: each is an input of that, made by a partition before, an attribute or a number."""
    outputs: tuple[fx.Node, ...]
    """The same, made here and needed elsewhere."""

    @property
    def name(self) -> str:
        """Return `captured_<i>` or `eager_<i>`."""
        return str(self.tag)

    def __str__(self) -> str:
        names = ", ".join(node.name for node in self.inputs)
        return f"{self.name}({names}):\n{textwrap.indent(graph_text(self.gm), '    ')}"


def outline(gm: fx.GraphModule) -> list[Part]:
    """Make each partition of a tagged graph a graph of its own, in order.

    Attributes and host scalars are copied into each that uses them; CPU scalars on the device are inputs, made first of
    all. Names and meta of nodes stay.
    """
    partitions: dict[PartitionTag, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if (tag := get_tag(node)) is not None:
            partitions.setdefault(tag, []).append(node)
    placeholders = gm.graph.find_nodes(op="placeholder")
    scalars = filter(values.is_host_scalar, gm.graph.nodes)
    symbols = ((values.symbol_of(n.meta.get("val")), n) for n in (*placeholders, *scalars))
    providers = [(symbol, node) for symbol, node in symbols if symbol is not None]
    available = dict.fromkeys([*placeholders, *filter(is_argument, gm.graph.nodes)])
    bodies: dict[PartitionTag, _Body] = {}
    for tag, nodes in partitions.items():
        bodies[tag] = _Body(gm, nodes, _among(providers, available))
        available.update(dict.fromkeys(nodes))
    needed = _behind(map(resolve, gm.graph.output_node().all_input_nodes))
    for body in bodies.values():
        needed.update(_behind(body.inputs))
    return [
        body.finish(tag, [node for node in partitions[tag] if node in needed])
        for tag, body in bodies.items()
    ]


def _among(
    providers: Iterable[tuple[sympy.Symbol, fx.Node]], available: Mapping[fx.Node, None]
) -> dict[sympy.Symbol, fx.Node]:
    """The symbols that can be had from `available` values, each by the first node that provides it."""
    found: dict[sympy.Symbol, fx.Node] = {}
    for symbol, provider in providers:
        made_of = (n for n in _behind([provider]) if not values.is_host_scalar(n))
        if all(node in available or node.op == "get_attr" for node in made_of):
            found.setdefault(symbol, provider)
    return found


def _written_input(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator returns as its result, None for other operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    return next(iter(values.mutated_inputs(node)), None)


def resolve(node: fx.Node) -> fx.Node:
    """The node that a value is known by outside its partition: in-place results are their input."""
    while (written := _written_input(node)) is not None:
        node = written
    return node


class _Body:
    """One partition's graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        nodes: Sequence[fx.Node],
        providers: Mapping[sympy.Symbol, fx.Node],
    ) -> None:
        self.inputs: list[fx.Node] = []
        self._gm = gm
        self._providers = providers
        self._graph = fx.Graph()
        self._inside: dict[fx.Node, fx.Node] = {}
        known = dict.fromkeys(value for node in nodes for value in (*node.all_input_nodes, node))
        for symbol in dict.fromkeys(itertools.chain.from_iterable(map(values.free_symbols, known))):
            if symbol in providers:
                self._value(providers[symbol], as_input=True)
        for node in nodes:
            self._copy(node)

    def _value(self, node: fx.Node, *, as_input: bool = False) -> fx.Node:
        """The value of `node` in here: made, copied in or an input."""
        if node in self._inside:
            return self._inside[node]
        is_scalar = values.is_host_scalar(node)
        source = resolve(node)
        if is_scalar and (symbol := values.symbol_of(node.meta.get("val"))) is not None:
            source = self._providers.get(symbol, node)
        if source is not node:
            self._inside[node] = self._value(source)
        elif not as_input and (is_scalar or node.op == "get_attr"):
            self._copy(node)
        else:
            last = self._inside[self.inputs[-1]] if self.inputs else None
            with self._graph.inserting_after(last):
                inside = self._graph.create_node("placeholder", node.name, name=node.name)
            inside.meta = _carried(node)
            self._inside[node] = inside
            self.inputs.append(node)
        return self._inside[node]

    def _copy(self, node: fx.Node) -> None:
        self._inside[node] = self._graph.node_copy(node, self._value)
        self._inside[node].meta.pop(KEY, None)

    def finish(self, tag: PartitionTag, outputs: Sequence[fx.Node]) -> Part:
        results = tuple(map(self._value, outputs))
        self._graph.output(results).meta["val"] = tuple(node.meta.get("val") for node in results)
        self._graph.lint()
        gm = torch_private.lazy_graph_module(self._gm, self._graph, str(tag))
        return Part(tag, gm, tuple(self.inputs), tuple(outputs))


def _behind(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`nodes`, and all that the host scalars among them are computed from."""
    found: dict[fx.Node, None] = {}
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            if values.is_host_scalar(node):
                left.extend(map(resolve, node.all_input_nodes))
    return found


def _carried(node: fx.Node) -> dict[str, object]:
    """Meta of a value where it comes in from elsewhere: it binds no symbols there."""
    return {key: value for key, value in node.meta.items() if key not in (KEY, "unbacked_bindings")}
