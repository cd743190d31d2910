"""Tell if a CUDA graph can hold a node, and if not, why.

The verdict is about the node alone: what it calls, what it reads and what it makes. It errs on the
side of capturing where nothing is known (custom operators): an operator that turns out not to be
capturable is marked `PROVEN` when the function is compiled again; it can be named in `unsafe_ops`.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.facts import op_tables, values
from cgpass.compile.facts.lines import user_line
from cgpass.telemetry.reason import Reason

LIFTED = "cgpass_lifted"
"""In `node.meta`: the copy to the device that our own lifting of a CPU scalar put there."""
PROVEN = "cgpass_proven"
"""In `node.meta`: code and detail of what running the node showed."""
_untraceable: set[torch._ops.OpOverload] = set()


def note_untraceable(op: torch._ops.OpOverload) -> None:
    """Note that the autograd formula of a custom operator can't be traced. See `compile/formulas.py`."""
    _untraceable.add(op)


def is_argument(node: fx.Node) -> bool:
    """Tell if a node puts a CPU scalar among the graph's inputs on the device.

    It belongs to no partition: it runs first of all, before anything writes the scalar.
    """
    return LIFTED in node.meta and node.all_input_nodes[0].op == "placeholder"


def is_passive(node: fx.Node) -> bool:
    """Tell if a node belongs to no partition: it is there wherever it is used."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    return values.is_host_scalar(node) or is_argument(node)


def has_cpu_scalars(gm: fx.GraphModule) -> bool:
    """Tell if a graph makes or reads tensors of one number on the CPU."""
    tensors = (tensor for node in gm.graph.nodes for tensor in values.tensors(node))
    return any(tensor.device.type == "cpu" and tensor.dim() == 0 for tensor in tensors)


@dataclass(frozen=True)
class _Query:
    node: fx.Node
    device: torch.device
    unsafe_ops: frozenset[str]
    collectives: bool

    @functools.cached_property
    def op(self) -> object:
        return values.called(self.node)[0]

    @functools.cached_property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for arg in self.node.all_input_nodes for t in values.tensors(arg))

    @functools.cached_property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return values.tensors(self.node)


_Found = tuple[str, str] | None
"""A rule's answer: code and detail, None if it has nothing against the node."""


def why_not_capturable(
    node: fx.Node,
    device: torch.device,
    *,
    unsafe_ops: frozenset[str] = frozenset(),
    collectives: bool = True,
) -> Reason | None:
    """Return the reason why `node` can't be part of a CUDA graph on `device`, None if it can.

    Placeholders, outputs, `get_attr`, host scalars and arguments are never in the way.
    """
    return _judge(_Query(node, device, unsafe_ops, collectives))


def _judge(query: _Query) -> Reason | None:
    node = query.node
    if node.target is operator.getitem:
        parent = node.all_input_nodes[0]
        return _judge(replace(query, node=parent)) if parent.op == "call_function" else None
    if is_passive(node):
        return None
    found = next(filter(None, (rule(query) for rule in _RULES)), None)
    if found is None:
        return None
    code, detail = found
    return Reason(code, op_name(node), detail, _fix(query, code), user_line(node))


def _fix(query: _Query, code: str) -> str:
    """Return the remedy for the operator itself if one is known, else the remedy for the reason's code."""
    name = _short_name(query.op) if isinstance(query.op, torch._ops.OpOverload) else ""
    if code not in op_tables.OPERATOR_CODES and name != "lift_fresh_copy":
        return op_tables.FIXES[code]
    if name == "_linalg_check_errors":
        checked = f"{values.argument(query.node, 'api_name')}".removeprefix("torch.")
        name = f"{checked.replace('.', '_')}_ex"
        if name not in op_tables.SYNCS:
            return f"use torch.{checked}_ex, which does not check"
    return op_tables.OPERATOR_FIXES.get(name, op_tables.FIXES[code])


def op_name(node: fx.Node) -> str:
    """Return the name of a node's operator for messages."""
    op = values.called(node)[0]
    name = values.hop_name(node)
    if name is not None:
        return name if op is node.target else f"{name}({op})"
    if str(op) == "cgpass.formula.default":
        return f"backward of {node.args[0]}"
    if isinstance(op, torch._ops.OpOverload) or node.op != "call_function":
        return str(op)
    return getattr(op, "__name__", str(op))


def _short_name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.removeprefix("aten::")


def _operator_names(target: object) -> frozenset[str]:
    """Return the names of an operator that `unsafe_ops` accepts: `"ns::op"` and `"ns::op.overload"`."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return frozenset({name, f"{name}.{target._overloadname}"})
    if isinstance(target, torch._ops.HigherOrderOperator):
        return frozenset({f"higher_order::{target.name()}"})
    return frozenset()


def names_behind(node: fx.Node) -> frozenset[str]:
    """Names of every operator that a node calls or is left of.

    Many operators that a user can name are gone when a graph is partitioned: functionalisation turned `add_` into
    `add`, `linear` became `mm`, Inductor's decompositions left nothing of `gelu`. Tracing notes where nodes come from:
    `original_aten` for decompositions, `source_fn_stack` for the call in the user's code. Of a backward's nodes it knows
    only the first: they are not the operator that was called in the forward.

    Source: torch/fx/experimental/proxy_tensor.py and torch/_dynamo/output_graph.py, 2.11 to 2.15.
    """
    operators = values.called(node)[0], node.target, node.meta.get("original_aten")
    called = [target for _, target in node.meta.get("source_fn_stack") or ()]  # by the user
    return frozenset().union(*map(_operator_names, operators), *map(_names_of_call, called))


_IN_PLACE = {
    "iadd": "add_",
    "imul": "mul_",
    "ipow": "pow_",
    "isub": "sub_",
    "itruediv": "div_",
}
"""Python's operators that write in place, by name: the methods that they call."""


def _names_of_call(target: object) -> frozenset[str]:
    """Names of the operator that Dynamo's graph calls: an operator, a function of torch or Python, or a tensor's method."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return _operator_names(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        only = getattr(target, overloads[0]) if len(overloads) == 1 else None
        return _operator_names(only) | {target._qualified_op_name}
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or "torch"  # built-in functions of torch have none
    if module == "_operator":
        name = _IN_PLACE.get(name, name)
    is_aten = module.split(".")[0] in ("torch", "_operator") and hasattr(torch.ops.aten, name)
    # the overload is not known, so each of them is named
    overloads = getattr(torch.ops.aten, name).overloads() if is_aten else ()
    return frozenset({f"aten::{name}"} if is_aten else ()).union(
        f"aten::{name}.{o}" for o in overloads
    )


def _listed_by_user(query: _Query) -> _Found:
    listed = query.unsafe_ops and query.unsafe_ops & names_behind(query.node)
    if not listed:
        return None
    called = _operator_names(query.op) | _operator_names(query.node.target)
    if own := listed & called:
        return "unsafe_ops", f"{min(own)} is listed in unsafe_ops"
    return "unsafe_ops", f"it is a part of {min(listed)}, which is listed in unsafe_ops"


def _by_kind(query: _Query) -> _Found:
    if PROVEN in query.node.meta:
        return query.node.meta[PROVEN]
    known = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    if query.node.op == "call_function" and isinstance(query.op, known):
        return None
    return "python_call", "it is Python code, which a replay does not run again"


def _by_operator(query: _Query) -> _Found:
    """By an operator's tags, its name and the arguments that make it wait."""
    op = query.op
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name, node = _short_name(op), query.node
    if op in _untraceable or op._schema.name == "cgpass::formula":  # which runs such a formula
        return (
            "opaque_autograd",
            "its autograd formula can't be traced: it may read data on the host",
        )
    if torch.Tag.cudagraph_unsafe in op.tags:
        return "cudagraph_unsafe", "the operator is tagged cudagraph_unsafe"
    if torch.Tag.data_dependent_output in op.tags:
        return "host_read", "the host reads a tensor's data and waits for the device"
    if name in op_tables.INDEXING:
        return _bool_index(node)
    if torch.Tag.dynamic_output_shape in op.tags and values.argument(node, "output_size") is None:
        return "dynamic_shape", "the size of its result depends on the data"
    if name == "_assert_scalar":
        return "host_only", "it checks a number on the host, and makes no tensor"
    if op.namespace in op_tables.HOST_NAMESPACES or name in op_tables.HOST_STATE:
        return "host_state", "it changes state of the host, which a replay does not repeat"
    if name in op_tables.SYNCS or str(op) in op_tables.SYNCS:
        return "host_sync", "its implementation waits for the device or copies to the host"
    detail = _why_it_waits(node, name)
    return None if detail is None else ("host_sync", detail)


def _why_it_waits(node: fx.Node, name: str) -> str | None:
    """Return the cause of an operator's wait for the device with these arguments, if it waits."""
    if name == "histc" and values.argument(node, "min") == values.argument(node, "max"):
        return "without a range it reads the smallest and largest value on the host"
    if name == "_grouped_mm" and any(t.dtype != torch.bfloat16 for t in values.tensors(node)):
        return "it reads the group offsets on the host unless the type is bfloat16"
    for read in op_tables.READ_ON_THE_HOST.get(name, ()):
        on_device = any(t.device.type != "cpu" for t in values.argument_tensors(node, read))
        if on_device or values.argument(node, read) is True:
            return f"its argument {read} makes it read data on the host"
    return None


def _bool_index(node: fx.Node) -> _Found:
    for tensor in values.argument_tensors(node, "indices"):
        if tensor.dtype in (torch.bool, torch.uint8):
            return "bool_index", f"an index of type {_dtype(tensor)} is a hidden nonzero()"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _higher_order(query: _Query) -> _Found:
    op = query.op
    if not isinstance(op, torch._ops.HigherOrderOperator):
        return None
    name = op.name()
    if name in op_tables.CONTROL_FLOW:
        return "control_flow", "the host decides what runs"
    if name in op_tables.CAPTURABLE_HOPS:
        return None
    if name not in op_tables.NESTED_GRAPH_HOPS:
        return "higher_order_op", f"the higher-order operator {name} is not known to be capturable"
    return _nested_graph(query)


def _nested_graph(query: _Query) -> _Found:
    bodies = values.bodies(query.node)
    if not bodies:
        return "nested_graph", "its nested graph was not found"
    inner = (replace(query, node=node) for body in bodies for node in body.graph.nodes)
    reason = next(filter(None, map(_judge, inner)), None)
    return None if reason is None else ("nested_graph", f"inside it, {reason.op}: {reason.detail}")


def _on(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type:
        return tensor.device.type == "meta"
    return None in (device.index, tensor.device.index) or tensor.device.index == device.index


def _effects(query: _Query) -> _Found:
    op = query.node.target
    if isinstance(op, torch._ops.OpOverload) and op._schema.name in op_tables.EFFECT_TOKENS:
        return "effect_token", "it keeps the order of side effects and computes nothing"
    if values.hop_name(query.node) == "with_effects":
        return "side_effect", "it has side effects, which a replay does not repeat"
    return None


def _devices(query: _Query) -> _Found:
    reads = [t for t in query.inputs if not _on(t, query.device)]
    makes = [t for t in query.outputs if not _on(t, query.device)]
    for tensor in (*reads, *makes):
        if tensor.device.type != "cpu":
            detail = f"it uses a tensor on {tensor.device}, the graph is on {query.device}"
            return "other_device", detail
    if not reads and not makes:
        return None
    on_device = any(_on(t, query.device) for t in (*query.inputs, *query.outputs))
    if not on_device and all(tensor.dim() == 0 for tensor in (*reads, *makes)):
        return "cpu_number", "it computes a number on the CPU"
    if not on_device:
        return "cpu_tensor", "it runs on the CPU"
    if makes:
        return "device_to_host", "it copies to the CPU and waits for the device"
    if query.node.meta.get(LIFTED):
        return "lifted", "it copies a CPU scalar to the device, so that its readers can be captured"
    if isinstance(query.op, torch._ops.OpOverload) and _short_name(query.op) in op_tables.COPIES:
        detail = "it copies from CPU memory, which must be pinned and stay in place"
        return "host_to_device", detail
    if all(tensor.dim() == 0 for tensor in reads):
        return "cpu_scalar", "it reads a CPU scalar tensor, whose value a recording would freeze"
    return "cpu_tensor", "it reads a tensor on the CPU"


def _layouts(query: _Query) -> _Found:
    for tensor in (*query.inputs, *query.outputs):
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            return "layout", f"it uses a tensor of layout {layout}"
        if tensor.is_quantized:
            return "layout", f"it uses a quantised tensor ({_dtype(tensor)})"
        if tensor.is_nested:
            return "layout", "it uses a nested tensor"
    if any(map(torch_private.is_zero_tensor, query.outputs)):
        return "layout", "it makes a tensor of zeros that has no memory"
    return None


def _unbacked(query: _Query) -> _Found:
    for node in (*query.node.all_input_nodes, query.node):
        if values.unbacked_symbols(node) and values.tensors(node):
            return "unbacked_size", "a size depends on data"
    for scalar in filter(values.is_scalar, query.node.all_input_nodes):
        if values.unbacked_symbols(scalar):
            return "host_scalar", f"it gets the number {scalar.name}, which depends on data"
        if isinstance(scalar.meta["val"], (float, torch.SymFloat)):
            return "host_scalar", f"it gets the float {scalar.name}, which may change every call"
    return None


def _last_of_all(query: _Query) -> _Found:
    if not query.inputs and not query.outputs:
        return "host_only", "it reads and makes no tensors, so it does no work on the device"
    if not query.collectives and values.is_collective(query.node):
        why = "NCCL would register its buffers, which lie in expandable segments: that corrupts memory"
        return "expandable_segments", why
    if torch_private.is_cudagraph_unsafe(query.node):
        return "torch_unsafe", "torch lists it as unsafe for CUDA graphs"
    return None


_RULES: tuple[Callable[[_Query], _Found], ...] = (
    _listed_by_user,
    _by_kind,
    _by_operator,
    _effects,
    _higher_order,
    _devices,
    _layouts,
    _unbacked,
    _last_of_all,
)
