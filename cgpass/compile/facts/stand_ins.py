"""Operators that cgpass made to stand in for the user's own: messages name the user's."""

import torch

_names: dict[torch._ops.OpOverload, str] = {}


def register(op: torch._ops.OpOverload, name: str) -> None:
    """Let messages call `op`, one of ours, `name`."""
    _names[op] = name


def user_name(op: object) -> str | None:
    """What messages call an operator of ours, None for every other one."""
    return _names.get(op) if isinstance(op, torch._ops.OpOverload) else None
