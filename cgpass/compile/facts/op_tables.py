"""Tables of single operators: which ones a CUDA graph can't hold, and what to do about it.

Names without a namespace are aten's. Source: a capture of every operator below and of what is missing here on an H200
with torch 2.11; ATen's implementations for what no tag tells (2.11 to 2.15).
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SYNCS = _names("""
    _unique nonzero_numpy _choose_qparams_per_tensor
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
    cholesky linalg_ldl_factor_ex linalg_ldl_solve segment_reduce _segment_reduce_backward
    aten.normal.Tensor_Tensor aten.normal.float_Tensor _linalg_check_errors
    _linalg_eigh _linalg_eigvals _linalg_svd linalg_eig linalg_eigvals linalg_matrix_exp linalg_pinv
    is_nonzero _pack_padded_sequence _to_sparse to_sparse _coalesce
    _nested_tensor_from_mask _nested_get_min_seqlen _nested_get_max_seqlen
""")
"""Operators without a telling tag that synchronise, by name or by `aten.name.overload`."""

READ_ON_THE_HOST = {
    "searchsorted": ("sorter",),
    "linalg_cholesky_ex": ("check_errors",),
    "linalg_inv_ex": ("check_errors",),
    "linalg_lu_factor_ex": ("check_errors",),
    "_linalg_solve_ex": ("check_errors",),
    "masked_fill": ("value",),
    "masked_fill_": ("value",),
    "index_fill": ("value",),
    "index_fill_": ("value",),
    "linspace": ("start", "end"),
    "logspace": ("start", "end"),
}
"""Arguments for which operators wait if they are true, or tensors on the device."""

QUANTISING = _names("""
    aten::quantize_per_tensor aten::quantize_per_tensor_dynamic aten::quantize_per_channel
    aten::_empty_affine_quantized aten::_empty_per_channel_affine_quantized
    aten::_make_per_tensor_quantized_tensor aten::_make_per_channel_quantized_tensor
""")
"""Operators whose result is quantised, which the fake tensor that stands for it does not say."""

WRITES_FIRST = _names("inductor::resize_storage_bytes_")
"""Operators that change their first argument, and whose schema does not say so.

Source: torch/_inductor/inductor_prims.py, 2.11 to 2.15. Dynamo makes it of `tensor.untyped_storage().resize_(n)`.
"""

HOST_STATE = WRITES_FIRST | _names("""
    _pin_memory _resize_output_ is_pinned pin_memory record_stream resize_ set_ shallow_copy_data_ fsdp::set_
""")
"""Operators that change or read what only the host knows: storages, streams, pinned memory."""

HOST_NAMESPACES = _names("c10d debugprims export mempool profiler streams symm_mem")
"""Namespaces whose operators work on host state; functional collectives are not among them."""

COLLECTIVE_NAMESPACES = _names(
    "_c10d_functional _c10d_functional_autograd c10d_functional c10d symm_mem"
)

STARTS_NOTHING = _names("wait_tensor wait_tensors _wrap_tensor_autograd")
"""Operators beside functional collectives, in their namespace: waits, and what makes a tensor that waits when it is used."""

WAITING_COLLECTIVES = _names("_dtensor::shard_dim_alltoall")
"""Collectives of other namespaces, whose results are there when they return.

Source: torch/csrc/distributed/c10d/Functional.cpp `shard_dim_alltoall`, 2.11 to 2.15. DTensor calls it on CUDA to go from
one sharded dimension to another; on CPU it gathers, and cuts.
"""

INDEXING = _names("""
    index _unsafe_index index_put index_put_ _unsafe_index_put _index_put_impl_
    _unsafe_masked_index _unsafe_masked_index_put_accumulate
""")
"""Operators that are capturable with integer indices and hide a nonzero() with boolean ones."""

COPIES = _names("_to_copy copy copy_ prims::device_put")
"""Operators that move data between devices."""

CONTROL_FLOW = _names(
    "associative_scan cond map_impl scan switch while_loop while_loop_stack_output"
)

NESTED_GRAPH_HOPS = _names("""
    control_deps hints_wrapper invoke_subgraph local_map_hop strict_mode tag_activation_checkpoint
    wrap wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled
""")
"""Higher-order operators that run a nested graph once: the graph decides."""

CAPTURABLE_HOPS = _names("""
    flex_attention flex_attention_backward flex_gemm foreach_map inline_asm_elementwise
    invoke_quant invoke_quant_packed out_dtype triton_kernel_wrapper_functional triton_kernel_wrapper_mutation
""")

EFFECT_TOKENS = _names("prims::_make_token prims::_sink_tokens")
"""Operators on the tokens that `with_effects` orders side effects by, which Inductor can't pass between graphs."""

INDUCTOR_RANDOM = _names("""
    prims::inductor_seed prims::inductor_seeds prims::inductor_lookup_seed
    prims::inductor_random prims::inductor_randint
""")
"""Random operators that Inductor's lowering gives their meaning.

What they do as aten operators is for tracing alone: `inductor_random` then draws from the generator and ignores its
seed, so that a recomputation gets other numbers. Source: torch/_inductor/inductor_prims.py, 2.11 to 2.15.
"""

FIXES = {
    "unsafe_ops": "leave it, unless it can be captured: then remove it from unsafe_ops",
    "failed_capture": "remove what waits for the device in it (.item(), .cpu()), or name it in unsafe_ops",
    "python_call": "make it a custom operator, or leave it: only this runs outside of graphs",
    "opaque_autograd": "write the formula without item(), tolist() and data-dependent sizes",
    "cudagraph_unsafe": "remove the tag if the operator neither syncs nor reads host memory",
    "host_read": "keep the value on the device (torch.where, tensor arithmetic) instead of item()",
    "dynamic_shape": "use a form with a fixed size (nonzero_static, torch.where, output_size=)",
    "host_state": "move it out of the compiled function",
    "host_sync": "use operators that read nothing on the host, or leave it: only this runs outside of graphs",
    "side_effect": "leave it: only this runs outside of graphs",
    "effect_token": "leave it: nothing is lost",
    "bool_index": "use torch.where, masked_fill or integer indices instead of a boolean mask",
    "control_flow": "compute both results and choose with torch.where; run a fixed number of loop steps",
    "higher_order_op": "leave it: only this runs outside of graphs",
    "nested_graph": "see the named operator: it keeps the whole nested graph out",
    "other_device": "move the tensor to the graph's device before the compiled function",
    "cpu_number": "leave it: it costs no device time",
    "cpu_tensor": "create the tensor on the device",
    "device_to_host": "copy to the CPU after the compiled function",
    "host_to_device": "create the tensor on the device, or copy it before the compiled function",
    "lifted": "pass the scalar as a tensor on the device to save the copy",
    "cpu_scalar": "make the scalar on the device, or pass a Python number if it never changes",
    "layout": "use a dense strided tensor",
    "unbacked_size": "make the size fixed before this (nonzero_static, torch.where)",
    "host_scalar": "pass it as a tensor on the device",
    "host_only": "leave it: it costs no device time",
    "expandable_segments": (
        "set NCCL_GRAPH_REGISTER=0 in the environment, import cgpass before the first process group is made, or "
        "turn expandable_segments off"
    ),
    "torch_unsafe": "leave it: only this runs outside of graphs",
}
"""Remedies, by the code of the reason."""

_SHARED_FIXES = {
    "leave it, or call it outside of the compiled function: no form of it runs in a CUDA graph": (
        "_linalg_eigh _linalg_svd linalg_eig linalg_ldl_factor_ex linalg_matrix_exp linalg_pinv"
    ),
    "leave out check_errors=True": (
        "_linalg_solve_ex linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex"
    ),
    "give the number of results: torch.nonzero_static(x, size=n); instead of x[mask] use torch.where": "argwhere nonzero",
    "keep the size fixed: torch.sort, and compare neighbours; or call it outside of the compiled function": (
        "_unique2 unique_consecutive unique_dim"
    ),
    "use torch.where(mask, value, x), which reads the value on the device": "masked_fill masked_fill_",
    "use x.index_copy(dim, index, values), which reads the values on the device": "index_fill index_fill_",
}

OPERATOR_FIXES = {
    **{name: fix for fix, names in _SHARED_FIXES.items() for name in names.split()},
    "_grouped_mm": "give it bfloat16",
    "allclose": "use torch.isclose(a, b).all(), which stays on the device",
    "bincount": "give the number of bins: x.new_zeros(n).scatter_add_(0, x, torch.ones_like(x)); minlength= does not help",
    "equal": "use (a == b).all(), which stays on the device",
    "histc": "pass min= and max=",
    "lift_fresh_copy": "make the constant once, outside of the compiled function (register_buffer)",
    "linalg_lstsq": "for matrices of full rank use torch.linalg.qr and solve_triangular",
    "linspace": "give start and end as numbers, or use start + (end - start) * torch.linspace(0, 1, steps)",
    "logspace": "give start and end as numbers, or use base ** (start + (end - start) * torch.linspace(0, 1, steps))",
    "masked_select": "keep the size fixed: torch.where(mask, x, 0)",
    "normal": "use mean + std * torch.randn_like(std), which does not check std",
    "repeat_interleave": "pass output_size=",
    "searchsorted": "leave out sorter=: search in the sorted sequence",
    "segment_reduce": "use torch.scatter_reduce with the row of each element",
}
"""Remedies for one operator, by name, where that is more than its code says."""

OPERATOR_CODES = frozenset({"dynamic_shape", "host_read", "host_sync"})
"""Reasons that are about what the operator does, not about its inputs."""
