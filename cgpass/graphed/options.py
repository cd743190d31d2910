"""`GraphedOptions`: how `make_graphed_callables` warms up, records and checks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cgpass.errors import OptionError
from cgpass.recompute.tracker import RNGStatesTracker

Hooks: TypeAlias = Mapping[str, Callable[..., None]]
"""Functions, by name of the moment."""


@dataclass(frozen=True, kw_only=True)
class GraphedOptions:
    """Settings of one call of `make_graphed_callables`.

    Raises:
        OptionError: A field's value is not one of those allowed.
    """

    num_warmup_iters: int = 3
    """Plain runs of forward and backward before each callable is recorded, at least one."""

    allow_unused_input: bool = False
    """True if inputs and parameters that require grad may get none."""

    pool: Any = None
    """Memory pool of the graphs (`torch.cuda.graph_pool_handle()`, a `torch.cuda.MemPool`); one of their own if None."""

    stream: Any = None
    """`torch.cuda.Stream` of warm-ups and captures; one of their own if None."""

    order: Sequence[int] | None = None
    """Pipeline schedule: chunk numbers from 1, positive for a forward, negative for a backward."""

    num_layers_per_chunk: int | Sequence[int] | None = None
    """With `order`: how many callables make up each chunk; as many in each if None."""

    capture_time_hooks: Sequence[Hooks | None] | None = None
    """One entry per callable: what runs around its warm-ups and captures, never on a replay."""

    warmup_hooks: Hooks | None = None
    """What runs around all warm-ups, once."""

    own_grads: bool = True
    """True if gradients keep their values while held; else the next replay overwrites them, in `.grad`, too: no accumulation."""

    max_rerecords: int = 16
    """Recordings made because parameters moved, or a call whose backward is due needs an earlier one, before further calls
    of that kind run without a graph."""

    rng_tracker: RNGStatesTracker | None = None
    """Whose states the callables draw from beside the default ones."""

    patch_modules: bool = False
    """True if modules get a graphed `forward` themselves; else a copy that shares their parameters does."""

    driver: Literal["auto", "cuda", "simulated", "none"] = "auto"
    """What records and replays; `auto`: `cuda` where the samples lie on CUDA, else `none`."""

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _CHECKS.items():
            value = getattr(self, name)
            if not fits(value):
                raise OptionError(
                    f"make_graphed_callables: option {name!r} must be {wanted}, got {value!r}."
                )
        if self.order is None and self.num_layers_per_chunk is not None:
            raise OptionError(
                "make_graphed_callables: option 'num_layers_per_chunk' needs an order."
            )

    @classmethod
    def parse(cls, options: "Mapping[str, Any] | GraphedOptions | None") -> "GraphedOptions":
        """Read what a user gave as `options=`.

        Raises:
            OptionError: An unknown name or a bad value.
        """
        if isinstance(options, GraphedOptions):
            return options
        if not isinstance(options, Mapping | None):
            raise OptionError(
                f"make_graphed_callables: options must be a GraphedOptions or a dict, got {type(options).__name__}."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in options or {} if name not in known]:
            raise OptionError(
                f"make_graphed_callables: unknown option {unknown[0]!r}; known: {', '.join(known)}."
            )
        return cls(**(options or {}))


_DRIVERS = ("auto", "cuda", "simulated", "none")
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "driver": (lambda value: value in _DRIVERS, f"one of {', '.join(map(repr, _DRIVERS))}"),
    "num_warmup_iters": (lambda value: type(value) is int and value > 0, "an int >= 1"),
    "max_rerecords": (lambda value: type(value) is int and value >= 0, "an int >= 0"),
    "rng_tracker": (
        lambda value: isinstance(value, RNGStatesTracker | None),
        "a cgpass.RNGStatesTracker or None",
    ),
}
"""Checks of each option: a test, and how a message calls it."""
