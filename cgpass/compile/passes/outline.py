"""Turn each partition of a tagged graph into a submodule."""

import itertools
import operator
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import is_argument
from cgpass.compile.facts.partition_tag import KEY, PartitionTag, get_tag, set_tag


def outline(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module that only calls submodules `captured_<i>` and `eager_<i>`, one for each partition of a tagged graph.

    Each returns a tuple, takes its inputs in the order of their first use and after them every
    backed symbol that its values mention and that is not among them. Attributes and host scalars
    are copied into each submodule that uses them; CPU scalars on the device are made first of all.
    Names and meta of nodes stay.
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
        nodes: Iterable[fx.Node],
        providers: Mapping[sympy.Symbol, fx.Node],
    ) -> None:
        self.inputs: list[fx.Node] = []
        self._gm = gm
        self._own = dict.fromkeys(nodes)
        self._providers = providers
        self._found: dict[fx.Node, fx.Node] = {}
        self._copied: list[fx.Node] = []
        for node in self._own:
            for arg in node.all_input_nodes:
                self._find(arg)
            self._copied.append(node)
        self._find_symbols()

    def _find(self, node: fx.Node) -> None:
        """Decide what `node`, an argument of something in here, is: own, copied in or an input."""
        if node in self._own or node in self._found:
            return
        source = self._source(node)
        self._found[node] = source
        if source is not node:
            self._find(source)
        elif node.op == "get_attr" or values.is_host_scalar(node):
            for arg in node.all_input_nodes:
                self._find(arg)
            self._copied.append(node)
        else:
            self.inputs.append(node)

    def _source(self, node: fx.Node) -> fx.Node:
        if values.is_host_scalar(node):
            symbol = values.symbol_of(node.meta.get("val"))
            return node if symbol is None else self._providers.get(symbol, node)
        return node if node.op == "get_attr" else _resolve(node)

    def _find_symbols(self) -> None:
        known = {values.symbol_of(node.meta.get("val")) for node in self.inputs}
        nodes = [*self.inputs, *self._copied]
        for symbol in dict.fromkeys(itertools.chain.from_iterable(map(values.free_symbols, nodes))):
            provider = self._providers.get(symbol)
            if symbol not in known and provider is not None:
                self._found[provider] = provider
                self.inputs.append(provider)

    def finish(self, outputs: Iterable[fx.Node], name: str) -> fx.GraphModule:
        graph = fx.Graph()
        inside: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            inside[node] = graph.create_node("placeholder", node.name, name=node.name)
            inside[node].meta = _carried(node)

        def mapped(node: fx.Node) -> fx.Node:
            while node not in inside:
                node = self._found[node]
            return inside[node]

        for node in self._copied:
            if node not in inside:
                inside[node] = graph.node_copy(node, mapped)
                inside[node].meta.pop(KEY, None)
        results = tuple(mapped(node) for node in outputs)
        graph.output(results).meta["val"] = tuple(node.meta.get("val") for node in results)
        graph.lint()
        return torch_private.lazy_graph_module(self._gm, graph, name)


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
