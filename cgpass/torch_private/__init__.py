"""The only package that touches private torch modules: others read its names from here.

Each symbol is imported on first use (but for a base class, which torch loads anyway), so that importing cgpass loads
neither Dynamo nor Inductor. What differs between torch 2.11 and 2.15 is told apart here, by looking for the feature
first and at the version second.
"""

from torch.utils._python_dispatch import TorchDispatchMode

from cgpass.torch_private.autocast import autocast_cache_off
from cgpass.torch_private.backward import (
    accumulates_everywhere,
    after_backward,
    checkpoint_hooks,
    double_backwards_raise,
    graph_task,
    kept_by_checkpoint,
    no_outer_saved_tensors_hooks,
    outside_dynamo,
    saved_on,
    saved_tensor,
    set_versions,
    unpack_hook,
)
from cgpass.torch_private.compiling import (
    boxed_graph_module,
    compile_with_aten,
    compile_with_inductor,
    compiled_by_themselves,
    donate_no_buffers,
    inductor_inner,
    inductor_option_names,
    lazy_graph_module,
    mark_boxed,
    own_tracing_context,
    report_output_strides,
    static_input_indices,
)
from cgpass.torch_private.dynamo import (
    backend_for_once,
    compile_again,
    compiled_code,
    handles_subclasses,
    input_names,
    input_position,
    is_compiled,
    is_compiled_by,
    is_disabled,
    not_one_graph,
    register_backend,
    static_mark,
)
from cgpass.torch_private.fakes import (
    is_fake,
    is_plain_fake,
    mode_of,
    no_fake_mode,
    sibling_fake_mode,
)
from cgpass.torch_private.frames import (
    GraphBreak,
    compilations,
    dynamo_counters,
    end_notes,
    frames_compiled,
    function_of,
    graph_breaks,
    is_ours,
    note_compilations,
    note_function,
    note_graph_breaks,
    was_given_up,
)
from cgpass.torch_private.graphs import (
    abandon_failed_capture,
    begin_allocating_to_pool,
    clear_cublas_workspaces,
    current_raw_stream,
    end_allocating_to_pool,
    have_stale_streams_follow,
    is_capturing,
    make_library_handles,
    pool_segments,
    release_pool,
    uses_expandable_segments,
)
from cgpass.torch_private.joint import (
    is_cudagraph_unsafe,
    is_nested_joint,
    min_cut_partition,
    recomputes_unmarked,
)
from cgpass.torch_private.kept_graphs import (
    NAMESPACES,
    cached_code,
    is_plain,
    pickled,
    told_by_no_key,
    unpickled,
)
from cgpass.torch_private.modes import (
    autograd_is_plain,
    autograd_keys_on,
    direct_apply,
    has_global_optimizer_hooks,
    in_forward_ad,
    in_functorch,
    in_vmap_or_functorch,
    is_exporting,
    is_jit_traced,
    leave_modes_above,
    mode_stacks,
    no_parametrize_cache,
    num_dispatch_modes,
    see_to_calls,
    set_grad_enabled,
    unwrap_if_dead,
    uses_compiled_autograd,
    without_modes,
)
from cgpass.torch_private.operators import (
    are_replaced,
    autograd_formula,
    cpu_implementation,
    custom_op,
    has_autocast_kernel,
    has_autograd_formula,
    has_effect,
    operator_names,
)
from cgpass.torch_private.process_groups import (
    around_gathering,
    before_process_groups_end,
    finished_work,
    has_process_groups,
    nccl_communicates,
    wait_tensor,
)
from cgpass.torch_private.profiles import profiler_range, profiler_state
from cgpass.torch_private.randomness import (
    default_generator,
    fake_like,
    hide_output_stride,
    install_rng_kernel,
    replace_default_generator,
    run_with_rng_state,
    sample_generator,
)
from cgpass.torch_private.storages import (
    WeakStorage,
    expired,
    has_symbolic_sizes,
    is_zero_tensor,
    on_storage,
    storage_at,
    storage_use_count,
    strided_allocator,
    swap_data_ptr,
    tensor_at_address,
    with_lazy_bits,
)
from cgpass.torch_private.traces import (
    current_trace_id,
    is_traced,
    trace_artifact,
    trace_past_event,
    traced_event,
    traced_under,
)
from cgpass.torch_private.training_graphs import TrainingLayout, mark_dynamic, training_layout
