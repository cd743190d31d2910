"""The work of AOTAutograd's autograd function around a training graph."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cgpass.torch_private.compiling import traced_metadata
from cgpass.torch_private.modes import has_default_saved_tensors_hooks, uses_compiled_autograd


@dataclass(frozen=True)
class TrainingLayout:
    """The work of AOTAutograd's autograd function on a training graph's inputs and outputs, where that is little."""

    num_inputs: int
    num_returned: int
    """Outputs that the caller gets; what is saved for the backward follows them."""
    requiring_grad: tuple[int, ...]
    """Inputs that did when the graph was traced, as Dynamo checks in each call."""
    differentiable: tuple[int, ...]
    """Outputs that require grad."""
    written: tuple[int, ...]
    """Inputs that the graph writes, which autograd is to know of."""
    checked: slice
    """Saved tensors that must not be written before the backward."""
    unchecked: slice
    rest: slice
    """Saved sizes."""
    tangents: tuple[Callable[[Any], Any], ...]
    """Brings each differentiable output's gradient into the layout that the backward was traced with."""
    dynamic: tuple[tuple[int, Any], ...]
    """Outputs with symbolic sizes, and their dimensions, for graphs traced after this one."""
    deterministic: bool | None
    """True if deterministic algorithms were asked for when it was traced."""


def training_layout() -> TrainingLayout | None:
    """The layout of the training graph that AOTAutograd compiles now; None where its autograd function does more.

    That is for outputs that are (views of) inputs or share memory, tensor subclasses, effect tokens, inputs that change
    their metadata, writes that AOTAutograd makes after the graph, hooks on saved tensors that it has traced, and compiled
    autograd.

    Source: torch/_functorch/_aot_autograd/runtime_wrappers.py `AOTDispatchAutograd` and schemas.py
    `ViewAndMutationMeta`, 2.11 to 2.15.
    """
    metadata = traced_metadata()
    if metadata is None or uses_compiled_autograd() or has_default_saved_tensors_hooks():
        return None
    if knows_external_objects():
        return None
    try:
        return _layout_of(metadata) if _is_little(metadata) else None
    except AttributeError:  # a torch that keeps its books otherwise
        return None


def knows_external_objects() -> bool:
    """Tell if Dynamo has traced streams or events, which newer versions have the backward find again."""
    from torch._functorch._aot_autograd import runtime_wrappers

    known: Any = getattr(runtime_wrappers, "index_to_external_object_weakref", ())
    return any(ref() is not None for ref in known)


def _is_little(metadata: Any) -> bool:
    from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

    more = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_outputs_aliased,
        metadata.num_intermediate_bases,
        metadata.tokens,
        metadata.num_backward_tokens,
        metadata.is_rng_op_functionalized,
        metadata.num_graphsafe_rng_states,
        metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw,
        metadata.num_opaque_objects_saved_for_bw,
        metadata.grad_enabled_mutation is not None,
    )
    kinds = (
        *metadata.subclass_inp_meta,
        *metadata.subclass_fw_graph_out_meta,
        *metadata.subclass_tangent_meta,
    )
    fresh = (OutputType.non_alias, OutputType.unsafe_view_alias)
    return (
        not any(more)
        and all(type(kind) is PlainTensorMeta for kind in kinds)
        and all(info.output_type in fresh for info in metadata.output_info)
        and all(
            getattr(info, "requires_grad_for_backward", info.requires_grad) == info.requires_grad
            for info in metadata.output_info
        )
    )


def _layout_of(metadata: Any) -> TrainingLayout:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    outputs = list(enumerate(metadata.output_info))
    differentiable = tuple(
        n for n, info in outputs if info.requires_grad and issubclass(info.raw_type, torch.Tensor)
    )
    metas = metadata.subclass_tangent_meta
    if len(metas) != len(differentiable):
        raise AttributeError("subclass_tangent_meta")

    def tangent(meta: Any) -> Callable[[Any], Any]:
        return lambda value: AOTDispatchAutograd.process_runtime_tangent(value, meta)[0]

    return TrainingLayout(
        num_inputs=len(metadata.input_info),
        num_returned=metadata.num_forward_returns,
        requiring_grad=tuple(n for n, i in enumerate(metadata.input_info) if i.requires_grad),
        differentiable=differentiable,
        written=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        checked=metadata.tensors_saved_for_backwards_with_vc_check_slice,
        unchecked=metadata.tensors_saved_for_backwards_no_vc_check_slice,
        rest=metadata.symints_saved_for_backwards_slice,
        tangents=tuple(map(tangent, metas)),
        dynamic=tuple((n, info.dynamic_dims) for n, info in outputs if info.dynamic_dims),
        deterministic=metadata.deterministic,
    )


def mark_dynamic(tensor: torch.Tensor, dimensions: Any) -> None:
    """Have Dynamo know which of an output's sizes were symbols."""
    from torch._functorch._aot_autograd import runtime_wrappers

    mark: Any = getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None)
    mark = mark or getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")  # noqa: B009
    mark(tensor, dimensions)
