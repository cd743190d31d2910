"""Refuses random operators where a recomputation could not draw their numbers again."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from cgpass import _torch
from cgpass.errors import CheckpointError

NOT_WARMED_UP: Final = (
    "while a CUDA graph is being captured, and the recomputation could not draw the same ones. Capture into a "
    "cgpass.CheckpointedGraph() after a `with graph.warm_up():` run of the same code, or draw outside of the checkpoint."
)
CAPTURE_ENDED: Final = (
    "in a recomputation on the other side of a CUDA graph's capture than its forward, and can't draw the same ones. "
    "Run forward and backward both while capturing, or both outside."
)


class ForbidRandom(_torch.TorchDispatchMode):
    """Raises at the first operator that draws random numbers; operators without tags are not looked at."""

    def __init__(self, why: str) -> None:
        """Args: why: end of the message."""
        super().__init__()
        self._why = why

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            raise CheckpointError(f"cgpass.checkpoint: {func} draws random numbers {self._why}")
        return func(*args, **kwargs)


def draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers: dropout that drops nothing doesn't."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("train", True) is False:
        return False
    return "0.0" not in (
        str(given.get("p")),
        str(given.get("dropout_p", 0.0 if _optional(func) else None)),
    )


def _optional(func: Any) -> bool:
    """Whether `dropout_p` may be left out, which means 0."""
    return any(a.name == "dropout_p" and a.has_default_value() for a in func._schema.arguments)
