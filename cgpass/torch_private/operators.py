"""Facts about operators, and custom ones."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

NAMESPACES = frozenset({"aten", "prims", "inductor_prims"})
"""Of torch's own operators."""


def wrap_formula(target: object, wrap: Callable[..., Any]) -> None:
    """Have a custom operator's `setup_context` and `backward` be what `wrap` makes of operator, `setup_context` and `backward`.

    Nothing happens for other targets, a second time, and where lists of tensors are given or returned.

    Source: torch/_library/custom_ops.py `CustomOpDef.register_autograd`, autograd.py `make_autograd_impl`, 2.11 to 2.15.
    """
    if isinstance(target, torch._ops.OpOverloadPacket):  # Dynamo leaves them in its graph
        target = getattr(target, "default", None)
    if not isinstance(target, torch._ops.OpOverload):
        return
    definition: Any = OPDEFS.get(target._schema.name)
    if definition is None or definition._opoverload is not target:
        return
    formula = definition._backward_fn
    if formula is None or hasattr(formula, "_wrapped_by_cgpass"):
        return
    values = (*target._schema.arguments, *target._schema.returns)
    if any("List[" in str(value.type) and "Tensor" in str(value.type) for value in values):
        return
    setup, wrapped = wrap(target, definition._setup_context_fn, formula)
    wrapped._wrapped_by_cgpass = True
    definition._setup_context_fn, definition._backward_fn = setup, wrapped


def cpu_implementation(op: object) -> Callable[..., Any] | None:
    """Return the CPU implementation of a custom operator, past anything that intercepts the call; None for torch's own operators.

    Dispatch modes that are entered see what it calls. Operators that write an argument are called through a
    higher-order operator (`auto_functionalized`), which has a Python implementation.
    """
    keys = torch._C.DispatchKey
    if isinstance(op, torch._ops.OpOverload):
        if op.namespace in NAMESPACES:
            return None
        return functools.partial(op.redispatch, torch._C.DispatchKeySet(keys.CPU))
    if isinstance(op, torch._ops.HigherOrderOperator) and "auto_functionalized" in op.name():
        return op.py_kernels.get(keys.CompositeExplicitAutograd)
    return None


def operator_names() -> list[str]:
    """Every operator that is registered, `ns::op` and `ns::op.overload`, in order.

    Source: torch/csrc/utils/python_dispatch.cpp, `_dispatch_get_all_op_names`, 2.11 to 2.15.
    """
    names = torch._C._dispatch_get_all_op_names()
    return sorted({*names, *(name.partition(".")[0] for name in names)})
