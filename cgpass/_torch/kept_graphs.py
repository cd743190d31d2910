"""AOTAutograd's cache, where graphs are kept for other processes."""

import functools
import itertools
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cgpass._torch.compiling import lazy_graph_module, restoring
from cgpass._torch.modes import has_default_saved_tensors_hooks, uses_compiled_autograd
from cgpass._torch.process_groups import has_process_groups
from cgpass._torch.storages import has_symbolic_sizes
from cgpass._torch.training_graphs import knows_external_objects

NAMESPACES = frozenset({"aten", "prims", "inductor_prims"})
"""Of torch's own operators."""

_KERNELS = ("CPU", "CUDA", "MPS", "Meta", "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode")
_ROOT = str(Path(torch.__file__).parent) + os.sep


def keeps_graphs() -> bool:
    """Whether AOTAutograd's cache is on, and traces depend on its key and `told_by_no_key` alone."""
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
        and not any(map(callable, _ignored_settings()))
        and all(map(_is_torchs, (*(fn for _, fn in _formulas()), *_patterns())))
        and _replaces_kernels_alone()
    )


def told_by_no_key() -> Iterator[Any]:
    """What a trace depends on beside what AOTAutograd's key has in every version."""
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    yield torch.is_autocast_cache_enabled(), torch.get_default_dtype()
    cuda, cudnn, einsum = torch.backends.cuda, torch.backends.cudnn, torch.backends.opt_einsum
    yield cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield torch._C._get_sdp_priority_order(), str(cuda.preferred_linalg_library())
    yield cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    yield torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    yield einsum.enabled, einsum.strategy
    yield torch.cuda.current_device() if torch.cuda.is_initialized() else None
    yield _ignored_settings()
    named = (f"{op} {getattr(fn, '__module__', '')} {fn}" for op, fn in _formulas())
    yield sorted(re.sub(r" at 0x\w+", "", name) for name in named)


def _ignored_settings() -> tuple[Any, ...]:
    """Source: torch/_functorch/config.py `_save_config_ignore`, passes and solvers, 2.11 to 2.15."""
    from torch._functorch import config

    return tuple(getattr(config, name) for name in config._save_config_ignore)


def _formulas() -> Iterator[tuple[Any, Any]]:
    """Formulas in the table that anybody may change, and in the copy that traces read."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    both = itertools.chain(decompositions.items(), fast_random_decomps().items())
    return ((op, fn) for op, fn in both if getattr(op, "namespace", None) in NAMESPACES)


def _patterns() -> Iterator[Any]:
    """Source: torch/_inductor/fx_passes/joint_graph.py and pattern_matcher.py, 2.11 to 2.15."""
    from torch._inductor.fx_passes import joint_graph

    for patterns in (joint_graph.early_patterns, *joint_graph.pass_patterns):
        for entry in itertools.chain.from_iterable(patterns.patterns.values()):
            yield from filter(callable, vars(entry).values())


def _is_torchs(value: Any) -> bool:
    """Whether a callable is, and the functions that it was made with."""
    value = value.func if isinstance(value, functools.partial) else value
    cells = [cell for cell in getattr(value, "__closure__", None) or () if cell != types.CellType()]
    held = (cell.cell_contents for cell in cells)
    for fn in (value, *(fn for fn in held if isinstance(fn, types.FunctionType))):
        code = getattr(fn, "__code__", None)  # functools.wraps copies the module's name
        if code is not None and not code.co_filename.startswith(_ROOT):
            return False
        if str(getattr(fn, "__module__", "")).partition(".")[0] != "torch":
            return False
    return True


def _replaces_kernels_alone() -> bool:
    """Whether no operator of torch's has an implementation of others that a trace sees; those of vmap come when called.

    Source: torch/library.py `_impls`, torch/_functorch/predispatch.py `VMAP_DECOMPOSITIONS_LIB`, 2.11 to 2.15.
    """
    made: Any = getattr(torch.library, "_impls", frozenset())
    vmap = sys.modules.get("torch._functorch.predispatch")
    own = getattr(getattr(vmap, "VMAP_DECOMPOSITIONS_LIB", None), "_op_impls", frozenset())
    return all(n.rpartition("/")[2] in _KERNELS or not n.startswith("aten/") for n in made - own)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor, fake or real, is strided, no subclass's, and of known size."""
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    known = type(tensor) in kinds and tensor.layout == torch.strided and not tensor.is_quantized
    return known and not has_symbolic_sizes(tensor)


def pickled(gm: torch.fx.GraphModule, *more: Any) -> bytes:
    """A graph with all that is known of its nodes, and more, like fake inputs. Raises what pickle does."""
    from torch.fx._graph_pickler import Options

    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return _pickler_type().dumps((gm, *more), options=options)


def unpickled(data: bytes) -> tuple[Any, ...]:
    """What `pickled` was given, in the fake mode of what is being compiled."""
    from torch._guards import TracingContext
    from torch.fx._graph_pickler import GraphPickler

    mode: Any = TracingContext.get().fake_mode
    found: Any = GraphPickler.loads(data, mode)
    gm, *more = found
    return lazy_graph_module(gm, gm.graph), *more


@functools.cache
def _pickler_type() -> Any:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    def is_layout_alone(tensor: FakeTensor) -> bool:
        """Whether it is told in few words; torch's take more than twice as long to read."""
        bits = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
        more = tensor._is_view(), tensor.constant is not None, tensor.real_tensor is not None
        return type(tensor) is FakeTensor and is_plain_tensor(tensor) and not any(bits + more)

    class Pickler(GraphPickler):
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, FakeTensorMode):  # of what a view is of: torch does so from 2.15 on
                return operator.attrgetter("fake_mode"), (self._unpickle_state,)
            if isinstance(obj, FakeTensor) and is_layout_alone(obj):
                # As torch describes those of other tensors, which may lie there, too.
                memory = self._meta_tensor_describer.describe_storage(obj.untyped_storage())
                layout = obj.storage_offset(), tuple(obj.shape), obj.stride()
                return _on_memory, (self._unpickle_state, memory, obj.dtype, obj.device, *layout)
            return super().reducer_override(obj)

    return Pickler


def _on_memory(state: Any, memory: Any, dtype: Any, device: Any, *layout: Any) -> Any:
    """A fake tensor of the mode that is unpickled into."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    storage = state.meta_converter.get_storage_memo(memory)
    if storage is None:
        storage = torch.UntypedStorage(memory.size, device="meta")
        state.meta_converter.set_storage_memo(memory, storage)
    with no_dispatch():
        meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, *layout)
        return FakeTensor(state.fake_mode, meta, device)


def cached_code(fn: Callable[[list[Any]], Any] | None, *kept: Any) -> Any:
    """A compiled graph that AOTAutograd's cache keeps as `kept`, which has to be picklable; if that is None, not at all."""
    return _cached_code_type()(fn, *kept)


@functools.cache
def _cached_code_type() -> Any:
    """Source: torch/_inductor/output_code.py, torch/_functorch/_aot_autograd/aot_autograd_result.py, 2.11 to 2.15."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._guards import TracingContext
    from torch._inductor.output_code import OutputCode

    class CachedCode(OutputCode):
        def __init__(self, fn: Any, kept: Any, metadata: Any = None) -> None:
            self.fn, self.kept, self.metadata = fn, kept, metadata
            self._boxed_call = True  # who wraps it copies what it has of its own
            if fn is not None and kept is not None:
                self.metadata = TracingContext.get().fw_metadata

        def __call__(self, inputs: Any) -> Any:
            assert self.fn is not None
            return self.fn(inputs)

        def __reduce__(self) -> tuple[Any, ...]:
            return cached_code, (None, self.kept, self.metadata)

        def __copy__(self) -> Any:  # the copy is what is saved, which this one need not be any more
            kept, self.kept = self.kept, None
            return cached_code(None, kept, self.metadata)

        def prepare_for_serialization(self) -> None:
            if self.kept is None:
                raise BypassAOTAutogradCache("cgpass can't keep this graph")

        def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
            restore = restoring.get()
            assert restore is not None
            TracingContext.get().fw_metadata = self.metadata  # which who traces has set
            self.fn, self.kept = restore(self.kept, graph_kwargs), None

    return CachedCode
