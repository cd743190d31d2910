"""The joint graph, and its split into forward and backward."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


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
    compiler: str,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    random: Sequence[torch.fx.Node] = (),
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
        return min_cut_rematerialization_partition(
            joint,
            joint_inputs,
            compiler=compiler,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )


def is_nested_joint(joint_inputs: Sequence[Any]) -> bool:
    """Tell if AOTAutograd asks for a split of the body of an `invoke_subgraph`: it gives no inputs then.

    Source: torch/_functorch/_aot_autograd/graph_compile.py `run_joint_graph_passes_on_hops`, 2.11 to 2.15.
    """
    return not joint_inputs


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have a module's global be another value inside."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def recomputes_unmarked(joint: torch.fx.GraphModule) -> bool:
    """Tell if the split may recompute random operators that nothing marks, for a setting's or a region's memory budget.

    Source: torch/_functorch/partitioners.py, `_get_memory_budget_annotation` and its readers, 2.11 to 2.15.
    """
    from torch._functorch import config

    saves_all = config.activation_memory_budget >= 1.0 and config.ban_recompute_not_in_allowlist
    if config.aggressive_recomputation or not saves_all:
        return True
    metas = [node.meta for node in joint.graph.nodes]
    keys = (key for meta in metas for key in (*meta, *(meta.get("custom") or ())))
    return any("memory_budget" in str(key) for key in keys)
