"""AOTAutograd's cache, where graphs are kept for other processes."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cgpass.torch_private.compiling import lazy_graph_module, restoring
from cgpass.torch_private.modes import has_default_saved_tensors_hooks, uses_compiled_autograd
from cgpass.torch_private.process_groups import has_process_groups
from cgpass.torch_private.storages import has_symbolic_sizes
from cgpass.torch_private.training_graphs import knows_external_objects


def told_by_no_key() -> tuple[Any, ...] | None:
    """Return the state that a trace depends on and AOTAutograd's key may lack, None if nothing is to be kept.

    Of decompositions and patterns that somebody changed it knows as little as AOTAutograd's own key.

    Source: torch/_functorch/config.py `_save_config_ignore`, passes and solvers, 2.11 to 2.15.
    """
    from torch._functorch import config

    keeps = (
        config.enable_autograd_cache
        and not config.strict_autograd_cache  # which takes a graph that can't be kept for an error
        and not torch.compiler.config.force_disable_caches
        and torch._inductor.config.fx_graph_cache
        and not torch._dynamo.config.caching_precompile
        and not uses_compiled_autograd()
        and not has_default_saved_tensors_hooks()
        and not knows_external_objects()
        and not has_process_groups()
    )
    ignored = [getattr(config, name) for name in config._save_config_ignore]
    if not keeps or any(map(callable, ignored)):
        return None
    cuda, cudnn, einsum = torch.backends.cuda, torch.backends.cudnn, torch.backends.opt_einsum
    return (
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        (torch.is_autocast_cache_enabled(), torch.get_default_dtype()),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        (cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()),
        (torch._C._get_sdp_priority_order(), str(cuda.preferred_linalg_library())),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled),
        (einsum.enabled, einsum.strategy),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        ignored,
    )


def is_plain(value: object) -> bool:
    """Tell if a value is a strided tensor, fake or real, no subclass's, of known size; or a number, no symbol; or none."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if not isinstance(value, torch.Tensor):
        return value is None or type(value) in (int, float, bool)
    known = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    plain = known and value.layout == torch.strided and not value.is_quantized
    return plain and not has_symbolic_sizes(value)


def pickled(gm: torch.fx.GraphModule, *more: Any) -> bytes:
    """A graph with all that is known of its nodes, and more, like fake inputs. Raises what pickle does."""
    from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, FakeTensorMode):  # of what a view is of: torch does so from 2.15 on
                return operator.attrgetter("fake_mode"), (self._unpickle_state,)
            return super().reducer_override(obj)

    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return Pickler.dumps((gm, *more), options=options)


def unpickled(data: bytes) -> tuple[Any, ...]:
    """Undo `pickled`, in the fake mode of what is being compiled."""
    from torch.fx._graph_pickler import GraphPickler

    loads: Any = GraphPickler.loads
    gm, *more = loads(data, TracingContext.get().fake_mode)
    return lazy_graph_module(gm, gm.graph), *more


def cached_code(fn: Callable[..., Any] | None, kept: bytes | None, metadata: Any = None) -> Any:
    """A compiled graph that AOTAutograd's cache keeps as `kept`; if that is None, not at all.

    Source: torch/_inductor/output_code.py, torch/_functorch/_aot_autograd/aot_autograd_result.py, 2.11 to 2.15.
    """
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import OutputCode

    class CachedCode(OutputCode):
        def __init__(self, fn: Any, kept: bytes | None, metadata: Any) -> None:
            self.fn, self.kept = fn, kept
            self.metadata = metadata if fn is None else TracingContext.get().fw_metadata
            self._boxed_call = True  # who wraps it copies what it has of its own

        def __call__(self, inputs: Any) -> Any:
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
            restore: Any = restoring.get()
            TracingContext.get().fw_metadata = self.metadata  # which who traces has set
            self.fn, self.kept = restore(self.kept, graph_kwargs), None

    return CachedCode(fn, kept, metadata)
