"""Facts about operators, and custom ones."""

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACES = frozenset({"aten", "prims", "inductor_prims"})
"""Of torch's own operators."""


def custom_op(qualname: str) -> torch._ops.OpOverload:
    """The operator that `torch.library.custom_op` made last under a name."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[qualname]._opoverload


def autograd_formula(
    op: torch._ops.OpOverload,
) -> tuple[Callable[..., Any] | None, Callable[..., Any]] | None:
    """The `setup_context`, if there is one, and the `backward` that `torch.library.custom_op`'s `op` has; None if none.

    Source: torch/_library/custom_ops.py `CustomOpDef.register_autograd`, 2.11 to 2.15.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(op._schema.name)
    if definition is None or definition._opoverload is not op or definition._backward_fn is None:
        return None
    return definition._setup_context_fn, definition._backward_fn


def cpu_implementation(op: object) -> Callable[..., Any] | None:
    """Return what runs a custom operator on CPU, past whatever intercepts the call; None for torch's own operators.

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


def has_effect(op: torch._ops.OpOverload) -> bool:
    """Tell if an operator was registered as having an effect, which orders its calls."""
    from torch._higher_order_ops.effects import has_effects

    return has_effects(op)


def has_autocast_kernel(op: torch._ops.OpOverload) -> bool:
    """Tell if autocast casts an operator's inputs."""
    keys = ("AutocastCPU", "AutocastCUDA")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(op._schema.name, key) for key in keys)


def operator_names() -> list[str]:
    """Every operator that is registered, `ns::op` and `ns::op.overload`, in order.

    Source: torch/csrc/utils/python_dispatch.cpp, `_dispatch_get_all_op_names`, 2.11 to 2.15.
    """
    names = torch._C._dispatch_get_all_op_names()
    return sorted({*names, *(name.partition(".")[0] for name in names)})
