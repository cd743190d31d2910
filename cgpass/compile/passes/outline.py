"""Turn each partition of a tagged graph into a submodule."""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import is_argument
from cgpass.compile.facts.partition_tag import KEY, PartitionTag, get_tag, set_tag


def outline(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module that only calls submodules `captured_<i>` and `eager_<i>`, one for each partition of a tagged graph.

    Each returns a tuple, and takes every backed symbol that its values mention, then its inputs in the order of their
    first use. Attributes and host scalars are copied into each submodule that uses them; CPU scalars on the device are
    made first of all. Names and meta of nodes stay.
    """
    return _Outliner(gm).run()


def _written_input(node: fx.Node) -> fx.Node | None:
    """The argument that an in-place operator returns as its result, None for other operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    return next(iter(values.mutated_inputs(node)), None)


def _resolve(node: fx.Node) -> fx.Node:
    """The node that a value is known by outside its partition: in-place results are their input."""
    while (written := _written_input(node)) is not None:
        node = written
    return node


class _Outliner:
    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._partitions: dict[PartitionTag, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if (tag := get_tag(node)) is not None:
                self._partitions.setdefault(tag, []).append(node)
        self._graph = fx.Graph()
        self._outer: dict[fx.Node, fx.Node] = {}
        self._modules: dict[str, object] = {}
        scalars = filter(values.is_host_scalar, gm.graph.nodes)
        nodes = [*gm.graph.find_nodes(op="placeholder"), *scalars]
        symbols = ((values.symbol_of(node.meta.get("val")), node) for node in nodes)
        self._providers = [(symbol, node) for symbol, node in symbols if symbol is not None]
        """The nodes that symbols can be taken from, placeholders first."""

    def run(self) -> fx.GraphModule:
        for node in self._gm.graph.find_nodes(op="placeholder"):
            self._outer[node] = self._graph.node_copy(node)
        for node in filter(is_argument, self._gm.graph.nodes):
            self._value(node)  # before what writes the input that it is made of
        bodies: dict[PartitionTag, _Body] = {}
        available = dict.fromkeys(self._outer)
        for tag, nodes in self._partitions.items():
            bodies[tag] = _Body(self._gm, nodes, self._providers_among(available))
            available.update(dict.fromkeys(nodes))
        output = self._gm.graph.output_node()
        needed = _behind(map(_resolve, output.all_input_nodes))
        for body in bodies.values():
            needed.update(_behind(body.inputs))
        for tag, body in bodies.items():
            self._call(tag, body, [node for node in self._partitions[tag] if node in needed])
        results = fx.map_arg(output.args[0], lambda arg: self._value(_resolve(arg)))
        self._graph.output(results).meta = dict(output.meta)
        for node in self._graph.find_nodes(op="get_attr"):
            self._modules[str(node.target)] = values.attribute(self._gm, str(node.target))
        name = type(self._gm).__name__
        outlined = torch_private.lazy_graph_module(self._modules, self._graph, name)
        outlined.training = self._gm.training
        outlined.meta.update(self._gm.meta)
        return outlined

    def _providers_among(self, available: Mapping[fx.Node, None]) -> dict[sympy.Symbol, fx.Node]:
        """The symbols that can be had from `available` values."""
        found: dict[sympy.Symbol, fx.Node] = {}
        for symbol, provider in self._providers:
            made_of = (n for n in _behind([provider]) if not values.is_host_scalar(n))
            if all(node in available or node.op == "get_attr" for node in made_of):
                found.setdefault(symbol, provider)
        return found

    def _call(self, tag: PartitionTag, body: "_Body", outputs: list[fx.Node]) -> None:
        name = str(tag)
        inputs = tuple(self._value(node) for node in body.inputs)
        self._modules[name] = body.finish(outputs, name)
        call = self._graph.create_node("call_module", name, inputs, name=name)
        call.meta["val"] = tuple(node.meta.get("val") for node in outputs)
        set_tag(call, tag)
        for position, node in enumerate(outputs):
            args = call, position
            item = self._graph.create_node("call_function", operator.getitem, args, name=node.name)
            item.meta = _carried(node)
            self._outer[node] = item

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node that replaces `node` in the outer graph; attributes and host scalars on first use."""
        if node not in self._outer:
            for arg in node.all_input_nodes:
                self._value(_resolve(arg))
            self._outer[node] = self._graph.node_copy(node, lambda n: self._outer[_resolve(n)])
        return self._outer[node]


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
        source = _resolve(node)
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

    def finish(self, outputs: Iterable[fx.Node], name: str) -> fx.GraphModule:
        results = tuple(map(self._value, outputs))
        self._graph.output(results).meta["val"] = tuple(node.meta.get("val") for node in results)
        self._graph.lint()
        return torch_private.lazy_graph_module(self._gm, self._graph, name)


def _behind(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`nodes`, and all that the host scalars among them are computed from."""
    found: dict[fx.Node, None] = {}
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            if values.is_host_scalar(node):
                left.extend(map(_resolve, node.all_input_nodes))
    return found


def _carried(node: fx.Node) -> dict[str, object]:
    """Meta of a value where it comes in from elsewhere: it binds no symbols there."""
    return {key: value for key, value in node.meta.items() if key not in (KEY, "unbacked_bindings")}
