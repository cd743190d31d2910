"""Refuses random operators where a recomputation could not draw their numbers again."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cgpass import torch_private
from cgpass.compile.facts.draws import draws
from cgpass.errors import CheckpointError

NOT_WARMED_UP: Final = (
    "while a CUDA graph is being captured, and the recomputation could not draw the same ones. Capture into a "
    "cgpass.CheckpointedGraph() after a `with graph.warm_up():` run of the same code, or draw outside of the checkpoint."
)
CAPTURE_ENDED: Final = (
    "in a recomputation on the other side of a CUDA graph's capture than its forward, and can't draw the same ones. "
    "Run forward and backward both while capturing, or both outside."
)


class ForbidRandom(torch_private.TorchDispatchMode):
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
