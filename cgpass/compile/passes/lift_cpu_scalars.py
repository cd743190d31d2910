"""Put CPU scalars and constants that device operators read on the device.

A CPU scalar tensor read by a device operator would be frozen into a recording, a constant made on
the CPU is copied from memory that isn't pinned: each would be a boundary for no good reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.capturability import LIFTED, why_not_capturable
from cgpass.compile.passes.base import Pass, PassContext, inherit_meta

aten = torch.ops.aten
prims = torch.ops.prims

_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten._to_copy.default: lambda node: node.args[0],
    aten.zeros.default: lambda _: 0,
    aten.zeros_like.default: lambda _: 0,
    aten.ones.default: lambda _: 1,
    aten.ones_like.default: lambda _: 1,
}
"""Operators that make a tensor of one number, and how to find the number."""

_EXACT = frozenset(
    {
        aten._to_copy.default,
        aten.add.Tensor,
        aten.div.Tensor,
        aten.mul.Tensor,
        aten.neg.default,
        aten.reciprocal.default,
        aten.rsub.Scalar,
        aten.rsub.Tensor,
        aten.sub.Tensor,
        prims.convert_element_type.default,
    }
)
"""Operators that give the same bits on the host and on the device."""

_HALF = (torch.float16, torch.bfloat16)
_IN_WIDE = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.mul.Tensor)
"""Operators whose kernels take a scalar on the host without rounding it to the other operand's dtype.

Source: aten/src/ATen/native/cuda/Loops.cuh `opmath_gpu_kernel_with_scalars` and who calls it, 2.11.
"""

_OTHER_KERNELS = (
    aten.div.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.pow.Tensor_Tensor,
)
"""Operators with other kernels for a second operand on the host: a product with its inverse, squares and cubes.

Source: aten/src/ATen/native/cuda/BinaryDiv*Kernel.cu, PowKernel.cu, 2.11.
"""

_COPIES = (aten._to_copy.default, prims.device_put.default)
_FRESH = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


def move_constant(constant: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The constant on `device`, as a real tensor even while a graph is being traced.

    **Lifetime:** the result owns its memory; outside of any graph's pool.
    """
    with torch_private.no_fake_mode():
        return constant.detach().to(device)


@dataclass(frozen=True)
class LiftCpuScalars(Pass):
    """Lift CPU scalars, constants and filled tensors that device operators read.

    - A CPU scalar among the inputs (a Python float that changes is one) is put on the device once,
      first of all: an argument of what reads it. What is computed from such scalars alone is
      computed on the device, by operators that give the same bits there.
    - A scalar that is computed otherwise is copied to the device after the node that computes it.
      This copy is the one boundary that is left.
    - A constant of the graph is moved to the device now.
    - A tensor of one number (`full`, `scalar_tensor`, `zeros`) is made on the device.

    Other copies from the CPU stay where they are, and so does what reads a scalar after the graph has written to it.

    Note [Scalars in aten's kernels]
        Given a scalar on the host, aten's kernels for half precision add, subtract and multiply
        in float32 with the scalar itself; all divide by multiplying with its inverse, and square
        where it is an exponent of two. One on the device they round to the operands' type first,
        divide by it and raise to it. Where such kernels run, these readers keep the scalar on the
        host, and run between graphs. A scalar that is divided by a number is divided on the host:
        on the device the kernel would multiply with the number's inverse.
    """

    name: ClassVar[str] = "lift_cpu_scalars"

    aten_kernels: bool = False
    """Set if aten's kernels run captured partitions, not Inductor's, which read scalars alike wherever they lie."""

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> tuple[()]:
        """Rewrite `gm`."""
        if ctx.device.type == "cpu":
            return ()
        if _Lift(gm, ctx.device, self.aten_kernels).run():
            gm.graph.eliminate_dead_code()
        return ()


class _Lift:
    """One run over one graph."""

    def __init__(self, gm: fx.GraphModule, device: torch.device, aten_kernels: bool) -> None:
        self._gm = gm
        self._graph = gm.graph
        self._device = device
        self._aten_kernels = aten_kernels
        self._lifted: dict[fx.Node, fx.Node] = {}
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._written: dict[int, int] = {}
        for node, position in self._order.items():
            for arg in values.mutated_inputs(node):
                for key in values.storage_keys(arg):
                    self._written.setdefault(key, position)

    def run(self) -> bool:
        """Let nodes read on the device what needs no copy from the CPU in every call, or is all that keeps them there."""
        changed = False
        for node, position in self._order.items():
            for source in self._needless(node):
                if position > self._first_write(source):
                    continue
                changed, lifted = True, self._lift(source, node)
                node.replace_input_with(source, lifted)
                if node.target is prims.device_put.default:
                    # Between one device Inductor makes nothing of it, and the caller would get the constant itself.
                    node.target, node.args, node.kwargs = aten.clone.default, (lifted,), {}
        return changed

    def _needless(self, node: fx.Node) -> list[fx.Node]:
        """CPU tensors that a node need not read."""
        found = list(filter(_is_cpu_tensor, node.all_input_nodes))
        if node.target in _COPIES:
            if LIFTED in node.meta or _is_cpu_tensor(node):
                return []
            return [each for each in found if self._is_argument(each) or self._is_made_once(each)]
        if not found or (self._aten_kernels and _rounds(node, found)):
            return []
        reason = why_not_capturable(node, self._device)
        return found if reason is not None and reason.code == "cpu_scalar" else []

    def _lift(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the node that replaces a CPU scalar on the device."""
        if source not in self._lifted:
            with torch_private.mode_of(source.meta["val"]):
                value = torch.empty_like(source.meta["val"], device=self._device)
            self._lifted[source] = lifted = self._on_device(source)
            inherit_meta(lifted, reader if source.op == "placeholder" else source, value)
        return self._lifted[source]

    def _on_device(self, source: fx.Node) -> fx.Node:
        constant = self._constant(source)
        if constant is not None:
            return self._moved(constant, source)
        if _is_filled(source):
            value, number = source.meta["val"], _FILLED[source.target](source)
            like = {"dtype": value.dtype, "layout": torch.strided, "device": self._device}
            with self._graph.inserting_before(source):
                return self._graph.call_function(aten.full.default, ([*value.shape], number), like)
        if source.op != "placeholder" and self._is_argument(source):
            args = {arg: self._lift(arg, source) for arg in source.all_input_nodes}
            with self._graph.inserting_after(source):
                lifted = self._graph.node_copy(source, args.__getitem__)
            if "device" in lifted.kwargs:
                lifted.update_kwarg("device", self._device)
            return lifted
        is_input = source.op == "placeholder"
        after = self._graph.find_nodes(op="placeholder")[-1] if is_input else source
        # Pageable memory is staged before the call returns, and nothing waits for the device.
        kwargs: dict[str, Any] = {"device": self._device, "non_blocking": True}
        with self._graph.inserting_after(after):
            copy = self._graph.call_function(aten._to_copy.default, (source,), kwargs)
        copy.meta[LIFTED] = True
        return copy

    def _is_argument(self, node: fx.Node) -> bool:
        """Tell if a CPU scalar is an input as it was when the call began, or is computed from such alone."""
        if not _is_cpu_tensor(node) or node.meta["val"].dim():
            return False
        if node.op == "placeholder" or self._is_made_once(node):
            return True
        if self._aten_kernels:
            same = node.target in _EXACT and not _inverts(node)
        else:
            same = node.target in _EXACT or _is_pointwise(node)
        return same and all(
            self._order[node] < self._first_write(arg) and self._is_argument(arg)
            for arg in node.all_input_nodes
        )

    def _is_made_once(self, node: fx.Node) -> bool:
        return self._constant(node) is not None or _is_filled(node)

    def _first_write(self, source: fx.Node) -> float:
        """Position of the first node that writes to the memory of `source`."""
        never = float("inf")
        return min(
            (self._written.get(k, never) for k in values.storage_keys(source)), default=never
        )

    def _constant(self, source: fx.Node) -> torch.Tensor | None:
        """The values of a constant of the graph, None if `source` is none or has no values."""
        if source.target in _FRESH:
            source = source.all_input_nodes[0]
        if source.op != "get_attr" or self._first_write(source) < float("inf"):
            return None
        found = values.attribute(self._gm, str(source.target))
        is_known = isinstance(found, torch.Tensor) and not torch_private.is_fake(found)
        return found if is_known else None

    def _moved(self, constant: torch.Tensor, stands_for: fx.Node) -> fx.Node:
        name = f"{stands_for.name}_on_{self._device.type}"
        while hasattr(self._gm, name):
            name += "_"
        self._gm.register_buffer(name, move_constant(constant, self._device), persistent=False)
        with self._graph.inserting_before(stands_for):
            return self._graph.get_attr(name)


def _is_cpu_tensor(node: fx.Node) -> bool:
    value = values.tensor_of(node)
    return value is not None and value.device.type == "cpu"


def _rounds(node: fx.Node, scalars: list[fx.Node]) -> bool:
    """Tell if aten gives other bits with a scalar on the device. See Note [Scalars in aten's kernels]."""
    if node.target in _OTHER_KERNELS:
        dtype = node.meta["val"].dtype
        return node.args[1] in scalars and (dtype.is_floating_point or dtype.is_complex)
    return node.target in _IN_WIDE and node.meta["val"].dtype in _HALF


def _inverts(node: fx.Node) -> bool:
    """Tell if aten would multiply with a number's inverse on the device."""
    return node.target is aten.div.Tensor and not isinstance(node.args[1], fx.Node)


def _is_pointwise(node: fx.Node) -> bool:
    """Tell if Inductor's kernels on the device compute an operator of CPU scalars, too."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_filled(node: fx.Node) -> bool:
    """Tell if a node makes a tensor of one number, of a size that is known."""
    if node.target is aten._to_copy.default and node.all_input_nodes:
        return False  # a copy of a tensor
    return node.target in _FILLED and all(type(size) is int for size in node.meta["val"].shape)
