"""Calls of operators that draw random numbers; `values.is_random` is the same for nodes."""

from collections.abc import Mapping
from typing import Any

import torch


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell if a call of an operator draws random numbers: dropout that drops nothing doesn't."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("train", True) is False:
        return False
    optional = any(a.name == "dropout_p" and a.has_default_value() for a in func._schema.arguments)
    dropout = given.get("dropout_p", 0.0 if optional else None)
    return "0.0" not in (str(given.get("p")), str(dropout))
