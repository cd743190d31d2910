"""Compiling with AOTAutograd and Inductor, and the split of a joint graph."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

restoring: contextvars.ContextVar[Any] = contextvars.ContextVar("restoring", default=None)


def traced_metadata() -> Any:
    """AOTAutograd's metadata of the graph that it compiles now, None outside of that."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    partition_fn: Callable[..., Any],
    config_patches: Mapping[str, Any],
    cache_key: str | None = None,
    restore: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Run `compile_fx` with our split and our compiler of the split graphs.

    `cache_key` is what AOTAutograd's cache adds to its own key, None to leave that cache off. A hit calls neither
    `inner_compile` nor `partition_fn`, but `restore` for each graph, with what `cached_code` was given.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return partition_fn(*args, **kwargs)

        def uuid(self) -> str:
            return str(cache_key)

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)

    patches = {
        **config_patches,
        "triton.cudagraphs": False,
        "custom_partitioner_fn": Partitioner(),
    }
    settings = {"enable_autograd_cache": False}
    if cache_key is not None:
        # What is kept is what the compiler gave, forward and backward together: both are compiled at once.
        names = ("enable_autograd_cache", "bundled_autograd_cache")
        settings = dict.fromkeys((*names, "force_non_lazy_backward_lowering"), True)
    token = restoring.set(restore)
    try:
        with functorch_config.patch(settings):
            compiled: Any = compile_fx(
                gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches
            )
    finally:
        restoring.reset(token)
    return compiled


def compile_with_aten(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    partition_fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Run AOTAutograd without Inductor and without decompositions; the compiler is called as `inner_compile` is.

    Tokens that order effects are made in the graph, as for Inductor: as inputs of the graph they would shift what
    AOTAutograd says of inputs and outputs by their positions.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=functools.partial(compiler, is_backward=True),
        inference_compiler=functools.partial(compiler, is_inference=True),
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(enable_autograd_cache=False, unlift_effect_tokens=True):
        return backend(gm, list(example_inputs))


def inductor_inner(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[[list[Any]], Any]:
    """`compile_fx_inner` with Inductor's own CUDA graphs off; boxed.

    Our split is taken out of Inductor's configuration: it has done its work, and Inductor's code cache can't pickle it.
    That cache is used though AOTAutograd's keeps the graph, as it is before it is compiled.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    kwargs["cudagraphs"] = BoxedBool(False)
    with (
        config.patch(custom_partitioner_fn=None),
        functorch_config.patch(bundled_autograd_cache=False),
    ):
        return compile_fx_inner(gm, example_inputs, **kwargs)


@contextlib.contextmanager
def own_tracing_context() -> Iterator[None]:
    """A fresh TracingContext with the ambient fake mode, for one piece of a graph.

    A second piece in the same context trips Inductor's check that output strides are reported once, and a piece
    would read the whole backward graph's donated buffers by position.
    """
    with tracing(TracingContext(TracingContext.get().fake_mode)):
        yield


def report_output_strides(strides: Sequence[tuple[Any, ...] | None]) -> None:
    """Tell AOTAutograd the strides of a forward graph's outputs, so that the backward is compiled for them."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(strides)


def donate_no_buffers() -> None:
    """Have AOTAutograd know that this backward takes no memory of its saved tensors.

    With donated buffers `retain_graph=True` raises, and pieces of a backward graph would donate the wrong inputs.
    To be called when the forward graph is compiled: its split has made the list by then, and nobody has read it.
    Turning the setting off instead leaves no list, which is not an empty one to a check before a backward.

    Source: torch/_functorch/_aot_autograd/graph_compile.py `fw_metadata.bw_donated_idxs`, 2.11 to 2.15.
    """
    donated = getattr(traced_metadata(), "bw_donated_idxs", None)
    if donated is not None:
        donated.clear()  # the metadata of wrapped and of plain tensors share this list


lazy_graph_module: Callable[..., torch.fx.GraphModule] = _LazyGraphModule
"""A `GraphModule` whose Python is generated when it is asked for: Inductor reads the graph alone.

Source: torch/fx/_lazy_graph_module.py, 2.11 to 2.15.
"""


def boxed_graph_module(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as generated Python that takes one list, empties it, and drops values at their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _ = gm.code  # a lazy GraphModule generates its forward only now
    forward = type(gm).forward

    def boxed(args: list[Any]) -> Any:
        return forward(gm, args)

    return mark_boxed(boxed)


def mark_boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that `fn`, a plain function, takes one list. Dynamo's wrappers carry the mark along."""
    setattr(fn, "_boxed_call", True)  # noqa: B010  functions take attributes
    return fn


def inductor_option_names() -> list[str]:
    """Every name that Inductor's configuration knows, `triton.cudagraphs` and the like included.

    Source: torch/utils/_config_module.py, `ConfigModule._config`, 2.11 to 2.15.
    """
    from torch._inductor import config

    return list(getattr(config, "_config"))  # noqa: B009  in no stub


def is_cudagraph_unsafe(node: torch.fx.Node) -> bool:
    """Tell if torch itself keeps a node out of CUDA graphs.

    Source: torch/_inductor/utils.py `is_cudagraph_unsafe_fx_node`, 2.11 to 2.15. Its list names some operators
    without the overload and so never finds them; those are looked for by their packet too.
    """
    from torch._inductor.utils import FORBIDDEN_CUDAGRAPH_OPS, is_cudagraph_unsafe_fx_node

    if is_cudagraph_unsafe_fx_node(node):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and str(packet) in FORBIDDEN_CUDAGRAPH_OPS


def min_cut_partition(
    joint: torch.fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    random: Sequence[torch.fx.Node] = (),
    **settings: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """AOTAutograd's min-cut split of a joint graph into forward and backward.

    Recomputed random operators stay as they are. Two nodes of `random` with equal arguments are two draws, also where torch
    would take them for one: its list has no operators but some of aten's (2.11 to 2.13), and no higher-order ones (to 2.15).
    """
    from torch._functorch import compile_utils, partitioners
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    kept_apart = [*compile_utils.rand_ops, *map(compile_utils.get_aten_target, random)]
    with (
        replaced(compile_utils, "rand_ops", kept_apart),
        replaced(partitioners, "functionalize_rng_ops", lambda joint, fw, bw, num_sym: (fw, bw)),
    ):
        return min_cut_rematerialization_partition(joint, joint_inputs, **settings)


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute, as a module's global, be another value inside."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
