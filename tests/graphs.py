"""Graphs over fake CUDA tensors, for tests on machines without a GPU.

A device guard for CUDA, which the CPU build of torch has none of, is put in place while tracing. It knows no current
device: write `.to("cuda:0")`, not `.to("cuda")`. Autograd's engine runs on "meta" tensors, which are then said to lie on
CUDA.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from cgpass import torch_private

CUDA = torch.device("cuda", 0)


# ---- a CUDA device guard for the CPU build


def install_noop_cuda_guard() -> None:
    """Put the meta device's guard, which does nothing, where CUDA's is missing.

    Source: c10/core/impl/DeviceGuardImplInterface.h; CUDA is 1, meta 14 of 21 device types.
    """
    if torch.backends.cuda.is_built():
        return
    cuda, meta, count = 1, 14, 21
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    name = "_ZN3c104impl26device_guard_impl_registryE"
    try:
        registry = (ctypes.c_void_p * count).in_dll(ctypes.CDLL(path), name)
    except (OSError, ValueError):
        pytest.skip("this build of torch hides its device guard registry")
    if not registry[cuda]:
        registry[cuda] = registry[meta]


# ---- tracing


@dataclass(frozen=True)
class Spec:
    """A tensor to trace with; `dynamic` makes every dimension symbolic."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cuda"
    dynamic: bool = False
    grad: bool = False


def cpu(*shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    """A CPU tensor to trace with."""
    return Spec(shape, dtype, "cpu")


def ints(*shape: int) -> Spec:
    """An int64 CUDA tensor to trace with."""
    return Spec(shape, torch.int64)


def dynamic(*shape: int) -> Spec:
    """A CUDA tensor with symbolic dimensions to trace with."""
    return Spec(shape, dynamic=True)


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Let CUDA tensors be made and computed with, all of them fake."""
    install_noop_cuda_guard()
    old_generators = torch.cuda.default_generators
    torch.cuda.default_generators = (torch.Generator(),)
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        torch.cuda.default_generators = old_generators


def fake_tensor(mode: FakeTensorMode, spec: Spec | Sequence[int]) -> torch.Tensor:
    """A fake tensor of `mode`; a bare shape is float32 on CUDA."""
    if not isinstance(spec, Spec):
        spec = Spec(tuple(spec))
    shape: Sequence[Any] = spec.shape
    if spec.dynamic:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        with torch_private.no_fake_mode():
            real = torch.empty(shape, device="meta")
        shape = mode.from_tensor(real, symbolic_context=context).shape
    with mode:
        tensor = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        return tensor.requires_grad_(spec.grad)


def fake_cuda_graph(fn: Callable[..., Any], *specs: Spec | Sequence[int]) -> fx.GraphModule:
    """Trace `fn` to aten operators on fake tensors of the given shapes, on CUDA unless told else."""
    with fake_cuda() as mode:
        args = [fake_tensor(mode, spec) for spec in specs]
        return make_fx(fn, record_stack_traces=True)(*args)


def traced(fn: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    """Trace `fn` to aten operators on fake tensors that are as the given ones."""
    return make_fx(fn, tracing_mode=mode)(*args)


@dataclass(frozen=True)
class Joint:
    """A joint graph as AOTAutograd hands it to a split."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    kwargs: dict[str, Any]


def joint_graph(fn: Callable[..., Any], *specs: Spec | Sequence[int]) -> Joint:
    """The joint graph of `fn` on fake CUDA tensors that all require gradients."""
    seen: list[Joint] = []

    def catch(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        seen.append(Joint(_copy(gm), inputs, kwargs))
        kwargs = {k: v for k, v in kwargs.items() if k.startswith(("num_fwd", "static_life"))}
        return torch_private.min_cut_partition(gm, inputs, compiler="eager", **kwargs)

    with fake_cuda() as mode:
        wanted = [Spec(tuple(s), device="meta", grad=True) for s in specs]
        _compile(fn, [fake_tensor(mode, spec) for spec in wanted], _boxed, catch)
    (joint,) = seen
    pytree.tree_map(
        _on_cuda, [joint.inputs, [node.meta.get("val") for node in joint.gm.graph.nodes]]
    )
    return joint


def _on_cuda(value: Any) -> None:
    if isinstance(value, FakeTensor) and value.device.type == "meta":
        value.fake_device = CUDA


def inference_graph(fn: Callable[..., Any], *specs: Spec | Sequence[int]) -> fx.GraphModule:
    """The graph of `fn` without gradients on fake CUDA tensors, as Dynamo and AOTAutograd make it."""
    seen: list[fx.GraphModule] = []

    def catch(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
        seen.append(_copy(gm))
        return _boxed(gm, inputs)

    with fake_cuda() as mode, torch.no_grad():
        _compile(fn, [fake_tensor(mode, spec) for spec in specs], catch, None)
    return seen[0]


def _compile(fn: Callable[..., Any], args: list[Any], compiler: Any, split: Any) -> None:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_with_aten(gm, inputs, compiler=compiler, partition_fn=split)

    torch.compiler.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)


def _boxed(gm: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(gm, graph)


def node_named(gm: fx.GraphModule, name: str) -> fx.Node:
    """The node of that name."""
    return next(node for node in gm.graph.nodes if node.name == name)


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    """The nodes that call `target`."""
    return gm.graph.find_nodes(op="call_function", target=target)


def sync_between(x, w):
    a = x @ w
    top, where = a.max(1)
    i = torch.nonzero(top)
    return i, (a * 2).relu(), where
