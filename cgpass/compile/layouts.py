"""Layouts that graphs were compiled for: what others hand to them comes so, or is laid out so.

Inductor chooses the layout of what is nobody's but other graphs': the backward is compiled for what the forward saves.
Partitions of one graph are compiled for what it was traced with.
"""

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgpass.compile.facts.values import graph_outputs, symbol_of, tensor_of
from cgpass.runtime.inputs import as_bits

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes one list of inputs, which it may empty, and returns a sequence of outputs."""
_Place = tuple[int, int | None]
"""An input, and the dimension of a tensor."""


def _strides_as_traced(
    gm: fx.GraphModule, values: Iterable[tuple[int, object]]
) -> Callable[[Sequence[Any]], dict[int, tuple[int, ...]]]:
    """Make a function that tells, from the inputs of a call, with which strides values were traced."""
    bindings = _bindings(gm)  # now: compiling may replace symbols by numbers
    wanted: dict[int, list[sympy.Expr]] = {}
    for position, value in values:
        fake = tensor_of(value)
        if fake is not None and fake.layout == torch.strided:
            strides = list(map(sympy.sympify, fake.stride()))
            if all(bindings.keys() >= stride.free_symbols for stride in strides):  # none by data
                wanted[position] = strides
    used = {symbol for strides in wanted.values() for s in strides for symbol in s.free_symbols}
    places = {symbol: place for symbol, place in bindings.items() if symbol in used}

    @functools.lru_cache
    def strides_at(*sizes: int) -> dict[int, tuple[int, ...]]:
        known = dict(zip(places, map(sympy.Integer, sizes), strict=True))
        return {i: tuple(int(s.xreplace(known)) for s in wanted[i]) for i in wanted}

    def strides_of(args: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        sizes = [args[at] if dim is None else args[at].shape[dim] for at, dim in places.values()]
        return strides_at(*sizes)

    return strides_of


def _lay_out(values: list[Any], strides: dict[int, tuple[int, ...]]) -> list[Any]:
    """Replace those that lie otherwise by copies."""
    for i, stride in strides.items():
        if isinstance(values[i], torch.Tensor) and not _lies(values[i], stride):
            values[i] = _copied(values[i], stride)
    return values


def outputs_as_traced(gm: fx.GraphModule) -> Callable[[Boxed], Boxed]:
    """Decorate what a graph is compiled to, so that outputs lie as they were traced.

    Inductor does so for outputs that it computes, but may give a view a new layout.
    """
    strides_of = _strides_as_traced(gm, enumerate(graph_outputs(gm)))

    def wrap(fn: Boxed) -> Boxed:
        def run(args: list[Any]) -> list[Any]:
            strides = strides_of(args)
            return _lay_out(list(fn(args)), strides)

        return run

    return wrap


def inputs_as_traced(
    gm: fx.GraphModule, positions: Iterable[int]
) -> Callable[[list[Any]], list[Any]]:
    """Make a function that has inputs of a call at `positions` lie as a graph was traced with them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    strides_of = _strides_as_traced(gm, [(i, inputs[i]) for i in positions])
    return lambda args: _lay_out(args, strides_of(args))


def laid_out_otherwise(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Inputs whose strides are not those that a graph was traced with."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        i
        for i, (node, given) in enumerate(zip(nodes, inputs, strict=True))
        if (fake := tensor_of(node)) is not None
        and isinstance(given, torch.Tensor)
        and fake.layout == given.layout == torch.strided
        and fake.stride() != given.stride()
    ]


def _bindings(gm: fx.GraphModule) -> dict[sympy.Symbol, _Place]:
    """Return the inputs that hold each symbol: inputs that are one first."""
    inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    found: list[tuple[object, _Place]] = [(value, (at, None)) for at, value in enumerate(inputs)]
    for at, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            found += [(size, (at, dim)) for dim, size in enumerate(value.shape)]
    places = [(symbol_of(value), place) for value, place in reversed(found)]
    return {symbol: place for symbol, place in places if symbol is not None}


def _lies(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Tell if a tensor is laid out so: no element is reached by strides of dimensions of size 1."""
    if tensor.numel() == 0:
        return True
    dimensions = zip(tensor.size(), tensor.stride(), stride, strict=True)
    return all(n == 1 or a == b for n, a, b in dimensions)


def _copied(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides."""
    copy = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=value.device)
    target = copy
    for d, step in enumerate(stride):
        if step == 0:  # all along it are one element
            target, value = target.narrow(d, 0, 1), value.narrow(d, 0, 1)
    as_bits(target).copy_(as_bits(value.resolve_conj()))
    return copy


def keep_contiguous(gm: fx.GraphModule, positions: Container[int]) -> None:
    """Have Inductor return gradients of parameters as they were traced, where that is contiguous and not channels-last.

    A backward that reads channels-last copies of what its forward saved is traced again by Inductor, with gradients of
    weights that are channels-last, too. Autograd copies each into the weight's layout, in kernels that the host launches
    one by one; here they are in the graph. Inductor drops a clone that changes no layout. `positions` are the gradients
    of parameters; others go on as they are to what made the input.
    """
    output = gm.graph.output_node()
    found = [node for i, node in enumerate(graph_outputs(gm)) if i in positions]
    with gm.graph.inserting_before(output):
        for node in dict.fromkeys(found):
            fake = tensor_of(node)
            if fake is None or node.op != "call_function" or not _is_contiguous_image(fake):
                continue
            clone = gm.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
            clone.meta.update(node.meta)
            output.replace_input_with(node, clone)
    gm.recompile()


def _is_contiguous_image(fake: torch.Tensor) -> bool:
    """Tell if a fake tensor is laid out as it could not be if it were channels-last."""
    if fake.layout != torch.strided or fake.dim() not in (4, 5):
        return False
    if not all(isinstance(size, int) for size in (*fake.size(), *fake.stride())):
        return False
    _, channels, *image = fake.size()
    return channels > 1 and any(size > 1 for size in image) and fake.is_contiguous()
