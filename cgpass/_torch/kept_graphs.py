"""AOTAutograd's cache, where graphs are kept for other processes."""

import contextlib
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cgpass._torch.compiling import lazy_graph_module, restoring
from cgpass._torch.modes import has_default_saved_tensors_hooks, uses_compiled_autograd
from cgpass._torch.process_groups import has_process_groups
from cgpass._torch.training_graphs import knows_external_objects


def keeps_graphs() -> bool:
    """Whether AOTAutograd's cache is on, and nothing here and now is traced that its key doesn't know of."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config
    from torch._inductor import config as inductor_config

    return (
        config.enable_autograd_cache
        and not config.strict_autograd_cache  # which takes a graph that can't be kept for an error
        and not torch.compiler.config.force_disable_caches
        and inductor_config.fx_graph_cache
        and not getattr(dynamo_config, "caching_precompile", False)
        and not uses_compiled_autograd()
        and not has_default_saved_tensors_hooks()
        and not knows_external_objects()
        and not has_process_groups()
        and not any(map(callable, settings_of_no_key()))
        and not _has_formulas_of_others()
        and not _has_patterns_of_others()
    )


def settings_of_no_key() -> tuple[Any, ...]:
    """AOTAutograd's settings that its key leaves out: passes and solvers, which may be callables.

    Source: torch/_functorch/config.py `_save_config_ignore`, 2.11 to 2.15.
    """
    from torch._functorch import config

    return tuple(getattr(config, name) for name in config._save_config_ignore)


def formulas(namespaces: Collection[str]) -> Iterator[str]:
    """Which formula Inductor has for each operator of some namespaces, which no key of torch's tells."""
    for op, fn in _tables_of_formulas():
        if getattr(op, "namespace", None) not in namespaces:
            continue
        given: tuple[Any, ...] = ()
        while isinstance(fn, functools.partial):
            given += (fn.args, sorted(fn.keywords.items()))
            fn = fn.func
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        yield f"{op} {getattr(fn, '__module__', '')}.{name} {given or ''}"


def _tables_of_formulas() -> Iterator[tuple[Any, Any]]:
    """Operators with their formulas, from the table that anybody may change and from the copy that traces read.

    Source: torch/_inductor/decomposition.py `decompositions` and `fast_random_decomps`, which makes the copy when the
    process compiles for the first time, 2.11 to 2.15.
    """
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    yield from decompositions.items()
    yield from fast_random_decomps().items()


_KERNELS = frozenset(
    {
        *("CPU", "CUDA", "MPS", "Meta", "Python", "BackendSelect", "ADInplaceOrView"),
        *("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"),  # torch's own are in Python
    }
)
"""Dispatch keys whose kernels leave a trace as it is."""

_ROOT = str(Path(torch.__file__).parent) + os.sep
"""Where torch's own files are."""


def _has_formulas_of_others() -> bool:
    """Whether somebody put formulas of his own in the place of those of torch's operators.

    Source: torch/library.py `_impls`, 2.11 to 2.15.
    """
    made: Any = getattr(torch.library, "_impls", frozenset())
    found = [n for n in made if n.startswith("aten/") and n.rpartition("/")[2] not in _KERNELS]
    if not all(map(_is_of_vmap, found)):
        return True
    return not _are_torchs(fn for _, fn in _tables_of_formulas())


def _is_of_vmap(implementation: str) -> bool:
    """Whether torch.vmap's formula, which comes with its first call, is the one in force for "aten/op/key".

    Source: torch/_functorch/predispatch.py `VMAP_DECOMPOSITIONS_LIB`; what the dispatcher tells of an operator names the
    file that registered each kernel (aten/src/ATen/core/dispatch/OperatorEntry.cpp `dumpState`), 2.11 to 2.15.
    """
    vmap = sys.modules.get("torch._functorch.predispatch")
    library = getattr(vmap, "VMAP_DECOMPOSITIONS_LIB", None)
    if implementation not in getattr(library, "_op_impls", ()):
        return False
    _, op, key = implementation.split("/")
    told = torch._C._dispatch_dump(f"aten::{op}").splitlines()
    in_force = f"{key}: registered at {getattr(vmap, '__file__', None)}:"
    return any(line.startswith(in_force) for line in told)


def _has_patterns_of_others() -> bool:
    """Whether somebody has Inductor replace what he chose in joint graphs.

    Source: torch/_inductor/fx_passes/joint_graph.py and torch/_inductor/pattern_matcher.py, 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import joint_graph

    for patterns in (joint_graph.early_patterns, *joint_graph.pass_patterns):
        for entry in itertools.chain.from_iterable(patterns.patterns.values()):
            if not _are_torchs(filter(callable, vars(entry).values())):
                return True
    return False


def _are_torchs(found: Iterable[Any]) -> bool:
    """Whether callables are torch's, and functions that they were made with."""
    waiting, seen = list(found), set[int]()
    while waiting:
        value = waiting.pop()
        value = value.func if isinstance(value, functools.partial) else value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if str(getattr(value, "__module__", "")).partition(".")[0] != "torch":
            return False
        code = getattr(value, "__code__", None)
        if code is not None and not code.co_filename.startswith(_ROOT):
            return False  # functools.wraps copies the module's name
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # of a name that is not bound
                held = cell.cell_contents
                if isinstance(held, (types.FunctionType, functools.partial)):
                    waiting.append(held)
    return True


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor, fake or real, is strided, no subclass's, and of known size."""
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    if type(tensor) not in kinds or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return not has_symbolic_sizes(tensor)


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether a size, stride or offset of a tensor is symbolic; of some that are not strided it is said, too."""
    return tensor._has_symbolic_sizes_strides


def attention_order() -> Any:
    """In which order kernels of attention are tried."""
    return torch._C._get_sdp_priority_order()


def pickled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bytes:
    """A graph with all that is known of its nodes, and its fake inputs. Raises what pickle does."""
    from torch.fx._graph_pickler import Options

    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return _pickler_type().dumps((gm, tuple(inputs)), options=options)


@functools.cache
def _pickler_type() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    class Pickler(GraphPickler):
        """Fake tensors in few words where they are plain ones, which they nearly always are.

        Those that are views know the mode of what they are views of: torch pickles that from 2.15 on.
        """

        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, FakeTensorMode):
                return _mode_of, (self._unpickle_state,)
            if isinstance(obj, torch.Tensor) and _has_no_more_than_a_layout(obj):
                return _on_memory, (self._unpickle_state, self._memory_of(obj), *_layout_of(obj))
            return super().reducer_override(obj)

        def _memory_of(self, tensor: torch.Tensor) -> Any:
            """The storage as torch describes those of other tensors, so that both are told to share it."""
            return self._meta_tensor_describer.describe_storage(tensor.untyped_storage())

    return Pickler


def _has_no_more_than_a_layout(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is no more than a type and a layout on some memory.

    Source: torch/_subclasses/meta_utils.py `MetaTensorDesc`, 2.11 to 2.15.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        type(tensor) is FakeTensor
        and is_plain_tensor(tensor)
        and not isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer))
        and not (tensor._is_view() or tensor.requires_grad or tensor.is_inference())
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.constant is None
        and tensor.real_tensor is None
        and not any(name.startswith("_dynamo") for name in vars(tensor))
    )


def _layout_of(tensor: Any) -> tuple[Any, ...]:
    size, stride = tuple(tensor.size()), tensor.stride()
    return tensor.dtype, size, stride, tensor.storage_offset(), tensor.fake_device


def _on_memory(
    state: Any,
    memory: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    device: torch.device,
) -> Any:
    """A fake tensor of the mode that is unpickled into, on memory that others may have been given, too."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    storages = state.meta_converter
    storage = storages.get_storage_memo(memory)
    if storage is None:
        storage = torch.UntypedStorage(memory.size, device="meta")
        storages.set_storage_memo(memory, storage)
    with no_dispatch():
        meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
        return FakeTensor(state.fake_mode, meta, device)


def _mode_of(state: Any) -> Any:
    return state.fake_mode


def unpickled(data: bytes) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    """What `pickled` was given, in the fake mode of what is being compiled."""
    from torch._guards import TracingContext
    from torch.fx._graph_pickler import GraphPickler

    mode: Any = TracingContext.get().fake_mode
    found: Any = GraphPickler.loads(data, mode)
    gm, inputs = found
    return lazy_graph_module(gm, gm.graph), inputs


def forward_metadata() -> Any:
    """What AOTAutograd knows of the inputs and outputs of the graphs that it compiles now."""
    from torch._guards import TracingContext

    return TracingContext.get().fw_metadata


def set_forward_metadata(metadata: Any) -> None:
    """Have it known again where AOTAutograd did not trace."""
    from torch._guards import TracingContext

    TracingContext.get().fw_metadata = metadata


def cached_code(fn: Callable[[list[Any]], Any] | None, kept: Any) -> Any:
    """A compiled graph that AOTAutograd's cache keeps as `kept`, which has to be picklable; None to keep nothing.

    Source: torch/_inductor/output_code.py `OutputCode` and torch/_functorch/_aot_autograd/aot_autograd_result.py
    `BundledOutputCodeLoadable`, 2.11 to 2.15.
    """
    return _cached_code_type()(fn, kept)


@functools.cache
def _cached_code_type() -> Any:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import OutputCode

    class CachedCode(OutputCode):
        def __init__(self, fn: Callable[[list[Any]], Any] | None, kept: Any) -> None:
            self.fn = fn
            self.kept = kept
            self._boxed_call = True  # who wraps it copies what it has of its own

        def __call__(self, inputs: Any) -> Any:
            assert self.fn is not None
            return self.fn(inputs)

        def __reduce__(self) -> tuple[Any, ...]:
            return cached_code, (None, self.kept)

        def __copy__(self) -> Any:  # the copy is what is saved, which this one need not be any more
            kept, self.kept = self.kept, None
            return cached_code(None, kept)

        def prepare_for_serialization(self) -> None:
            if self.kept is None:
                raise BypassAOTAutogradCache("cgpass can't keep this graph")

        def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
            restore = restoring.get()
            assert restore is not None
            self.fn, self.kept = restore(self.kept, graph_kwargs), None

    return CachedCode
