"""Operators that a node stands for: the one it calls, the one it was decomposed from, the one the user called.

By the time a graph is partitioned, many operators that a user can name are gone: functionalisation turned `add_` into
`add`, `linear` became `mm`, Inductor's decompositions left nothing of `gelu`. Tracing notes where nodes come from:
`original_aten` for decompositions, `source_fn_stack` for the call in the user's code. Of a backward's nodes it knows
only the first: they are not the operator that was called in the forward.

Source: torch/fx/experimental/proxy_tensor.py and torch/_dynamo/output_graph.py, 2.11 to 2.15.
"""

import operator

import torch
from torch import fx

from cgpass.compile.facts import values

_PYTHON_OPERATORS = {
    "iadd": "add_",
    "imatmul": "matmul",
    "imul": "mul_",
    "ipow": "pow_",
    "isub": "sub_",
    "itruediv": "div_",
    "matmul": "matmul",
}
"""Python's operators that tracing replaces by other ones of ATen."""


_untraceable: set[torch._ops.OpOverload] = set()


def note_untraceable(op: torch._ops.OpOverload) -> None:
    """Note that the autograd formula of a custom operator can't be traced. See `compile/formulas.py`."""
    _untraceable.add(op)


def is_untraceable(op: torch._ops.OpOverload) -> bool:
    """Tell if an operator's formula can't be traced, or it runs such a formula."""
    return op in _untraceable or op._schema.name == "cgpass::formula"


def operator_names(target: object) -> frozenset[str]:
    """Return what `unsafe_ops` may call an operator: `"ns::op"` and `"ns::op.overload"`."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return frozenset({name, f"{name}.{target._overloadname}"})
    if isinstance(target, torch._ops.HigherOrderOperator):
        return frozenset({f"higher_order::{target.name()}"})
    return frozenset()


def names_behind(node: fx.Node) -> frozenset[str]:
    """Names of every operator that a node calls or is left of."""
    names = operator_names(values.called(node)[0]) | operator_names(node.target)
    names |= operator_names(node.meta.get("original_aten"))
    called = [target for _, target in node.meta.get("source_fn_stack") or ()]  # by the user
    return names.union(*map(_names_of_call, called))


def _names_of_call(target: object) -> frozenset[str]:
    """Names of the operator that Dynamo's graph calls: an operator, a function of torch, or a tensor's method."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return operator_names(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        overloads = target.overloads()
        only = {f"{name}.{overloads[0]}"} if len(overloads) == 1 else set()
        return frozenset({name, *only})
    name = target if isinstance(target, str) else _function_name(target)
    is_aten = name is not None and hasattr(torch.ops.aten, name)
    return frozenset({f"aten::{name}"}) if is_aten else frozenset()


def _function_name(target: object) -> str | None:
    """The name of a function of torch or of Python's `operator`, None for what is neither."""
    name = getattr(target, "__name__", None)
    if not isinstance(name, str):
        return None
    if getattr(operator, name, None) is target:
        return _PYTHON_OPERATORS.get(name)
    module = getattr(target, "__module__", None)
    return name if module is None or module.split(".")[0] == "torch" else None
