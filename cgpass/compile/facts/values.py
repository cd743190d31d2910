"""Facts about a node's value: tensors, storages, mutation, randomness, symbols.

Everything here reads `node.meta["val"]`, the fake value that tracing left, and operator schemas.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental import symbolic_shapes
from torch.utils._pytree import tree_leaves

from cgpass import torch_private
from cgpass.compile.facts import op_tables

_SCALARS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
_SHAPE_READERS = frozenset(
    {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous"}
)
RANDOM_HOPS = frozenset(
    {
        "graphsafe_run_with_rng_state",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "run_dtensor_rng_op",
    }
)
"""Higher-order operators that draw from, or save, a generator's state."""
_OPERATOR_WRAPPERS = {
    "graphsafe_run_with_rng_state": 0,
    "auto_functionalized": 0,
    "auto_functionalized_v2": 0,
    "with_effects": 1,
}
"""Higher-order operators that run one operator, with its place among their arguments; behind it come its own."""
_EFFECT_HOPS = frozenset({"with_effects", "print", "call_torchbind", "aoti_call_delegate"})


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors among a node's outputs, in order."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # as nearly always; this is asked for many times a node
        return (value,)
    return tuple(v for v in tree_leaves(value) if isinstance(v, torch.Tensor))


def tensor_of(value: object) -> torch.Tensor | None:
    """Return the tensor that a node stands for; None for a number, several tensors, and what is no node."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def hop_name(node: fx.Node) -> str | None:
    """The name of the higher-order operator that a node calls, None for any other node."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return None


def called(node: fx.Node) -> tuple[object, tuple[object, ...], Mapping[str, object]]:
    """Return a node's operator and arguments; for a wrapper that runs one operator, the wrapped ones."""
    at = _OPERATOR_WRAPPERS.get(hop_name(node) or "")
    if at is not None and len(node.args) > at:
        kwargs = {k: v for k, v in node.kwargs.items() if k != "rng_state"}
        return node.args[at], node.args[at + 1 :], kwargs
    return node.target, node.args, node.kwargs


def bodies(node: fx.Node) -> tuple[fx.GraphModule, ...]:
    """Return the nested graphs that a higher-order operator gets as arguments."""
    owner = node.graph.owning_module
    if hop_name(node) is None or owner is None:
        return ()
    paths = (str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr")
    found = (attribute(owner, path) for path in paths)
    return tuple(body for body in found if isinstance(body, fx.GraphModule))


def _any_inside(node: fx.Node, holds: Callable[[fx.Node], bool]) -> bool:
    """Tell if something holds for a node in the nested graphs that a higher-order operator gets."""
    return any(holds(inner) for body in bodies(node) for inner in body.graph.nodes)


def attribute(gm: torch.nn.Module, path: str) -> object:
    """Return the attribute of `gm` at a dotted path, None if there is none."""
    found: object = gm
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def graph_outputs(gm: fx.GraphModule) -> tuple[Any, ...]:
    """Return the outputs of a graph that returns a tuple: nodes and constants."""
    results: Any = gm.graph.output_node().args[0]
    return tuple(results)


def num_ops(gm: fx.GraphModule) -> int:
    """Operators that a graph calls."""
    called = (node.target for node in gm.graph.nodes if node.op == "call_function")
    return sum(target is not operator.getitem for target in called)


def is_scalar(node: fx.Node) -> bool:
    """Tell if a node's value is one number, symbolic or not."""
    return isinstance(node.meta.get("val"), _SCALARS)


def is_host_scalar(node: fx.Node) -> bool:
    """Tell if a node computes a number on the host without reading any tensor's data: it can be repeated anywhere.

    `sym_size` and arithmetic on symbolic integers do, `item()` and custom operators that return a number don't.
    """
    if node.op != "call_function" or not is_scalar(node) or hop_name(node) is not None:
        return False
    if node.target is operator.getitem:
        return all(is_host_scalar(arg) for arg in node.all_input_nodes)
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target._opname in _SHAPE_READERS:
            return True
        if torch.Tag.data_dependent_output in node.target.tags:
            return False
    return all(is_scalar(arg) for arg in node.all_input_nodes)


def has_nested_ints(gm: fx.GraphModule) -> bool:
    """Tell if a graph gets sizes that stand for the offsets of a jagged tensor: new offsets, another size."""
    found = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    return any(isinstance(v, torch.SymInt) and v.node.is_nested_int() for v in found)


def _storages(node: fx.Node) -> dict[int, torch.UntypedStorage]:
    made = (t.untyped_storage() for t in tensors(node) if t.layout == torch.strided)
    return {storage._cdata: storage for storage in made}


def storage_keys(node: fx.Node) -> frozenset[int]:
    """The identities of the storages that a node's outputs lie in; views share their base's."""
    return frozenset(_storages(node))


def allocates(node: fx.Node) -> bool:
    """Tell if an operator makes memory for its outputs; views don't."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    read = {key for arg in node.all_input_nodes for key in storage_keys(arg)}
    made = (storage for key, storage in _storages(node).items() if key not in read)
    return not all(symbolic_shapes.statically_known_true(s.nbytes() == 0) for s in made)


def _nodes(value: object) -> Iterator[fx.Node]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the argument nodes that a node writes to, by its schema.

    A Triton kernel counts as writing to all its tensors, a nested graph to all operands if it writes to one of its inputs.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        first = node.args[:1] if schema.name in op_tables.WRITES_FIRST else ()
        found = list(_nodes([*first, *(argument(node, name) for name in written)]))
    elif hop_name(node) == "triton_kernel_wrapper_mutation":
        found = list(_nodes(node.kwargs.get("kwargs")))
    elif any(_writes_inputs(body) for body in bodies(node)):
        found = [arg for arg in node.all_input_nodes if arg.op != "get_attr"]
    else:
        found = []
    return tuple(dict.fromkeys(arg for arg in found if tensors(arg)))


def _writes_inputs(body: fx.GraphModule) -> bool:
    own = {key for node in body.graph.find_nodes(op="placeholder") for key in storage_keys(node)}
    written = [arg for node in body.graph.nodes for arg in mutated_inputs(node)]
    return any(own & storage_keys(arg) or arg.op == "placeholder" for arg in written)


def argument(node: fx.Node, name: str) -> object:
    """Return the value that a node passes for the argument `name`: its default if left out, None if unknown."""
    target, args, kwargs = called(node)
    if not isinstance(target, torch._ops.OpOverload):
        return kwargs.get(name)
    for position, arg in enumerate(target._schema.arguments):
        if arg.name == name:
            if position < len(args) and not arg.kwarg_only:
                return args[position]
            return kwargs.get(name, arg.default_value)
    return None


def argument_tensors(node: fx.Node, name: str) -> list[torch.Tensor]:
    """The tensors that a node passes for the argument `name`, in lists, too."""
    return [tensor for arg in _nodes(argument(node, name)) for tensor in tensors(arg)]


def is_random(node: fx.Node) -> bool:
    """Tell if a node draws random numbers, so that its order among such nodes matters; attention without dropout doesn't."""
    if hop_name(node) in RANDOM_HOPS:
        return True
    target, _, _ = called(node)
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded not in target.tags:
            return False
        dropout = argument(node, "dropout_p")
        return not (isinstance(dropout, (int, float)) and dropout == 0)
    return _any_inside(node, is_random)


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell if a call of an operator draws random numbers; dropout that drops nothing doesn't."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("train", True) is False:
        return False
    optional = any(a.name == "dropout_p" and a.has_default_value() for a in func._schema.arguments)
    dropout = given.get("dropout_p", 0.0 if optional else None)
    return "0.0" not in (str(given.get("p")), str(dropout))


def is_inductor_random(node: fx.Node) -> bool:
    """Tell if only kernels that Inductor makes compute a node's random numbers."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name in op_tables.INDUCTOR_RANDOM
    return _any_inside(node, is_inductor_random)


def is_collective(node: fx.Node) -> bool:
    """Tell if a node communicates between processes, so that its order among such nodes matters."""
    target, _, _ = called(node)
    if isinstance(target, torch._ops.OpOverload):
        return (
            target.namespace in op_tables.COLLECTIVE_NAMESPACES
            or target._schema.name in op_tables.WAITING_COLLECTIVES
        )
    return _any_inside(node, is_collective)


def starts_collective(node: fx.Node) -> bool:
    """Tell if a node returns results that are not there before something waits for them."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "_c10d_functional"
        and target._opname not in op_tables.STARTS_NOTHING
    )


def has_side_effect(node: fx.Node) -> bool:
    """Tell if a node writes to an input, returns nothing or runs host code; random numbers and collectives don't count."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if hop_name(node) in _EFFECT_HOPS or mutated_inputs(node) or _any_inside(node, has_side_effect):
        return True
    return node.meta.get("val") is None or node.is_impure(impure_random=False)


def _symbolic(node: fx.Node) -> list[Any]:
    """The parts of a node's value that have symbols."""
    return [
        leaf
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (isinstance(leaf, torch.Tensor) and torch_private.has_symbolic_sizes(leaf))
    ]


def free_symbols(node: fx.Node) -> tuple[sympy.Symbol, ...]:
    """Return the symbols in a node's value, in sizes, strides, offsets and numbers, by name."""
    return tuple(sorted(symbolic_shapes.free_symbols(_symbolic(node)), key=str))


def unbacked_symbols(node: fx.Node) -> tuple[sympy.Symbol, ...]:
    """The symbols in a node's value that depend on data, by name."""
    return tuple(sorted(symbolic_shapes.free_unbacked_symbols(_symbolic(node)), key=str))


def symbol_of(value: object) -> sympy.Symbol | None:
    """Return the symbol that a value is, if it is just one."""
    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None


def known_strides(output: Any) -> tuple[Any, ...] | None:
    """Return an output's strides, None for what is no tensor or has some that depend on data."""
    fake = tensor_of(output)
    strides = () if fake is None else fake.stride()
    unknown = fake is None or symbolic_shapes.free_unbacked_symbols(strides)
    return None if unknown else tuple(strides)
