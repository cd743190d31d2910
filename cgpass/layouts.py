"""Layouts that graphs were compiled for: what others hand to them comes so, or is laid out so.

Inductor chooses the layout of what is nobody's but other graphs': the backward is compiled for what the forward saves.
Partitions of one graph are compiled for what it was traced with.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import sympy
import torch
from torch import fx

from cgpass.graph.size_check import SymbolValues
from cgpass.graph.values import graph_outputs
from cgpass.runtime import fast
from cgpass.runtime.bits import copy_all

if TYPE_CHECKING:
    from cgpass.telemetry import CallStats

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Takes one list of inputs, which it may empty, and returns a sequence of outputs."""
_Sizes = tuple[Any, ...]
_Move = tuple[int, tuple[int, ...]]
"""A position, and the strides that the tensor there is to have."""
_SIZES_KEPT: Final = 256
"""Combinations of sizes whose layouts are known; others run as a whole again."""


def _geometry(values: Sequence[Any], positions: tuple[int, ...]) -> object:
    """Something that is equal for equal sizes and strides; in Python where nothing is recorded."""
    if fast.is_loaded:
        return fast.geometry(values, positions)
    found = [values[i] for i in positions]
    return tuple([(x.size(), x.stride()) if isinstance(x, torch.Tensor) else None for x in found])


class StrideNotes:
    """Has outputs come with the strides that other graphs were compiled for.

    Inductor chooses the layout of saved tensors, and compiles the backward for it: a slice may be saved without the gaps
    of what it is a slice of. Partitions keep the traced one.
    """

    def __init__(self, positions: frozenset[int], sizes: Sequence[int] = ()) -> None:
        """Know nothing yet.

        Args:
            positions: Outputs that nobody but other graphs reads.
            sizes: Inputs that are sizes of others.
        """
        self.stats: CallStats | None = None
        """Counts calls that run as a whole since nothing is known of their sizes."""
        self._positions = tuple(sorted(positions))
        self._sizes = tuple(sizes)
        self._whole: Boxed | None = None
        self._noted: dict[_Sizes, dict[int, _Place]] = {}
        """By sizes, what is known of each output; the oldest first."""
        self._said: tuple[_Sizes, object] | None = None
        """Sizes and geometry that were noted last."""
        self._fitting: tuple[_Sizes, object] | None = None
        """Sizes and geometry that were found to be as they should."""

    def noting(self, fn: Boxed) -> Boxed:
        """`fn`, with the layouts noted that it returns."""

        def run(args: list[Any]) -> Any:
            sizes = self._sizes_of(args)
            outputs = fn(args)
            said = (sizes, _geometry(outputs, self._positions))
            if said != self._said:
                found = [(i, outputs[i]) for i in self._positions]
                if sizes not in self._noted and len(self._noted) >= _SIZES_KEPT:
                    del self._noted[next(iter(self._noted))]
                self._noted[sizes] = {i: _Place(x) for i, x in found if isinstance(x, torch.Tensor)}
                self._said = self._fitting = said
            return outputs

        self._whole = run
        return run

    def matching(self, fn: Boxed) -> Boxed:
        """`fn`, with outputs laid out as those noted."""

        def run(args: list[Any]) -> list[Any]:
            sizes = self._sizes_of(args)
            noted = self._noted.get(sizes)
            if noted is None:
                return self._run_whole(args)
            outputs = list(fn(args))
            found = (sizes, _geometry(outputs, self._positions))
            if found == self._fitting:
                return outputs
            wanted = ((i, place.strides_for(outputs[i])) for i, place in noted.items())
            moves = [(i, strides) for i, strides in wanted if strides is not None]
            _move(outputs, moves)
            if not moves:
                self._fitting = found
            return outputs

        return run

    def _sizes_of(self, args: Sequence[Any]) -> _Sizes:
        return tuple([args[i] for i in self._sizes])

    def _run_whole(self, args: list[Any]) -> list[Any]:
        """Run a call as what was split: which strides others expect of these sizes, it alone tells."""
        assert self._whole is not None
        if self.stats is not None:
            self.stats.calls += 1
            self.stats.warmups += 1
        return list(self._whole(args))


class _Traced:
    """Strides of some inputs or outputs, as traced."""

    def __init__(self, gm: fx.GraphModule, values: Iterable[tuple[int, object]]) -> None:
        """Args: gm: before it is compiled. values: of it, with their positions."""
        self._wanted: dict[int, tuple[Any, ...]] = {}
        for position, value in values:
            fake = value.meta.get("val") if isinstance(value, fx.Node) else None
            if isinstance(fake, torch.Tensor) and fake.layout == torch.strided:
                strides = fake.stride()
                self._wanted[position] = tuple(
                    s if isinstance(s, int) else s.node.expr for s in strides
                )
        used = [s for strides in self._wanted.values() for s in strides if not isinstance(s, int)]
        self._sizes = SymbolValues.of(gm, {symbol for s in used for symbol in s.free_symbols})
        self._positions = tuple(self._wanted)
        self._fitting: tuple[tuple[int, ...], object] = ((), b"")
        """Sizes and geometry that were found to be as they should."""
        self._moves: dict[tuple[tuple[int, ...], object], list[_Move]] = {}
        """By sizes and geometry, which to lay out anew and with which strides."""

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        """What the strides depend on, of a call's inputs."""
        return self._sizes.read(args)

    def lay_out(self, values: list[Any], sizes: tuple[int, ...]) -> None:
        """Have tensors lie as traced, each copied if it doesn't."""
        found = (sizes, _geometry(values, self._positions))
        if found == self._fitting:
            return
        moves = self._moves.get(found)
        if moves is None:
            if len(self._moves) >= _SIZES_KEPT:
                del self._moves[next(iter(self._moves))]
            moves = self._moves[found] = list(self._find_moves(values, sizes))
        _move(values, moves)
        if not moves:
            self._fitting = found

    def _find_moves(self, values: list[Any], sizes: tuple[int, ...]) -> Iterator[_Move]:
        known = self._sizes.known(sizes)
        for i, wanted in self._wanted.items():
            if not isinstance(values[i], torch.Tensor):
                continue
            strides = [s if isinstance(s, int) else s.xreplace(known) for s in wanted]
            if not all(isinstance(s, int | sympy.Integer) for s in strides):
                continue  # they depend on data
            stride = tuple(map(int, strides))
            if not _same(values[i].size(), values[i].stride(), stride):
                yield i, stride


def outputs_as_traced(gm: fx.GraphModule) -> Callable[[Boxed], Boxed]:
    """Has what a graph is compiled to return outputs as it was traced.

    Inductor does so for outputs that it computes, but may lay a view out anew.

    Args:
        gm: The graph, before it is compiled.
    """
    traced = _Traced(gm, enumerate(graph_outputs(gm)))

    def wrap(fn: Boxed) -> Boxed:
        def run(args: list[Any]) -> list[Any]:
            sizes = traced.sizes(args)
            outputs = list(fn(args))
            traced.lay_out(outputs, sizes)
            return outputs

        return run

    return wrap


def inputs_as_traced(gm: fx.GraphModule, positions: Iterable[int]) -> Callable[[Boxed], Boxed]:
    """Has what a graph is compiled to, in parts, get inputs as it was traced with: the graph as a whole was not.

    Args:
        gm: The graph, before it is compiled.
        positions: Inputs that may come with other strides.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    traced = _Traced(gm, [(i, inputs[i]) for i in positions])

    def wrap(fn: Boxed) -> Boxed:
        def run(args: list[Any]) -> Sequence[Any]:
            traced.lay_out(args, traced.sizes(args))
            return fn(args)

        return run

    return wrap


def laid_out_otherwise(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Inputs whose strides are not those that a graph was traced with."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        i
        for i, (node, given) in enumerate(zip(nodes, inputs, strict=True))
        if isinstance(fake := node.meta.get("val"), torch.Tensor)
        and isinstance(given, torch.Tensor)
        and fake.layout == given.layout == torch.strided
        and fake.stride() != given.stride()
    ]


class _Place:
    """Sizes and strides of an output."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """As they are now."""
        self._size, self._stride = tensor.size(), tensor.stride()
        self._order = _order(self._size, self._stride)

    def strides_for(self, value: Any) -> tuple[int, ...] | None:
        """Those that a value in this place should have; None if it has them, or is no tensor.

        Of values whose sizes depend on data the order of dimensions is what is known.
        """
        if not isinstance(value, torch.Tensor):
            return None
        size, stride, wanted = value.size(), value.stride(), self._stride
        if size != self._size:
            has_gaps = self._stride != _dense(self._size, self._order)
            if has_gaps and _order(size, stride) == self._order:
                return None
            wanted = _dense(size, self._order)
        return None if _same(size, stride, wanted) else wanted


def _order(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the outermost to the innermost in memory."""
    return tuple(sorted(range(len(size)), key=lambda d: (-stride[d], d)))


def _dense(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in an order of dimensions."""
    strides, step = [0] * len(size), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(1, size[d])
    return tuple(strides)


def _same(size: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two layouts of one size are the same: no element is reached by strides of dimensions of size 1."""
    if 0 in size:
        return True
    return all(n == 1 or a == b for n, a, b in zip(size, stride, other, strict=True))


def _move(values: list[Any], moves: Sequence[_Move]) -> None:
    """Put copies with these strides in the place of tensors, all made by one call for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for i, stride in moves:
        value = values[i]
        values[i] = target = torch.empty_strided(
            value.size(), stride, dtype=value.dtype, device=value.device
        )
        if 0 in stride:  # all along it are one element
            for d, step in enumerate(stride):
                if step == 0:
                    target, value = target.narrow(d, 0, 1), value.narrow(d, 0, 1)
        targets, sources = by_dtype.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in by_dtype.values():
        copy_all(targets, sources)


def keep_contiguous(gm: fx.GraphModule, positions: Container[int]) -> None:
    """Have Inductor return gradients of parameters as they were traced, where that is contiguous and not channels-last.

    A backward that reads channels-last copies of what its forward saved is traced anew by Inductor, with gradients of
    weights that are channels-last, too. Autograd copies each into the weight's layout, in kernels that the host launches
    one by one; here they are in the graph. Inductor drops a clone that changes no layout.

    Args:
        gm: A backward graph, before it is compiled.
        positions: Its outputs that are gradients of parameters. Others go on as they are to what made the input.
    """
    output = gm.graph.output_node()
    found = [node for i, node in enumerate(graph_outputs(gm)) if i in positions]
    with gm.graph.inserting_before(output):
        for node in dict.fromkeys(found):
            if not isinstance(node, fx.Node) or node.op != "call_function":
                continue
            if not _is_contiguous_image(node.meta.get("val")):
                continue
            clone = gm.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
            clone.meta.update(node.meta)
            output.replace_input_with(node, clone)
    gm.recompile()


def _is_contiguous_image(fake: object) -> bool:
    """Whether a fake tensor is laid out as it could not be if it were channels-last."""
    if (
        not isinstance(fake, torch.Tensor)
        or fake.layout != torch.strided
        or fake.dim() not in (4, 5)
    ):
        return False
    if not all(isinstance(size, int) for size in (*fake.size(), *fake.stride())):
        return False
    _, channels, *image = fake.size()
    return channels > 1 and any(size > 1 for size in image) and fake.is_contiguous()
