"""`GraphedOptions`: how `make_graphed_callables` warms up, records and checks."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from cgpass.errors import OptionError
from cgpass.recompute.tracker import RNGStatesTracker

HookFunctions: TypeAlias = Callable[..., None] | Sequence[Callable[..., None]]
"""One function, or several that are called in this order."""
Hooks: TypeAlias = Mapping[str, HookFunctions]
"""By name of the moment."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "static_input_check": ("rerecord", "error", "off"),
    "driver": ("auto", "cuda", "simulated", "none"),
}
_AT_LEAST: Mapping[str, int] = {"num_warmup_iters": 1, "max_rerecords": 0}
_FLAGS = (
    "allow_unused_input",
    "own_grads",
    "patch_modules",
)


@dataclass(frozen=True, kw_only=True)
class GraphedOptions:
    """Settings of one call of `make_graphed_callables`.

    Raises:
        OptionError: A field's value is not one of those allowed.
    """

    num_warmup_iters: int = 3
    """Plain runs of forward and backward before each callable is recorded, at least one."""

    allow_unused_input: bool = False
    """Whether inputs and parameters that require grad may get none."""

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

    warmup_hooks: Hooks | Sequence[Hooks | None] | None = None
    """What runs around all warm-ups, once; or one entry per callable, around the warm-ups of that one."""

    own_grads: bool = True
    """Whether gradients keep their values while held; else the next replay overwrites them, in `.grad`, too: no accumulation."""

    static_input_check: Literal["rerecord", "error", "off"] = "rerecord"
    """What a moved parameter or buffer does; `off` only where they provably never move."""

    max_rerecords: int = 16
    """Recordings made because parameters moved, or a call whose backward is due needs an earlier one, before further calls
    of that kind run without a graph."""

    rng_tracker: RNGStatesTracker | None = None
    """Whose states the callables draw from beside the default ones."""

    patch_modules: bool = False
    """Whether modules get a graphed `forward` themselves; else a copy that shares their parameters does."""

    driver: Literal["auto", "cuda", "simulated", "none"] = "auto"
    """What records and replays; `auto`: `cuda` where the samples lie on CUDA, else `none`."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise _bad(self, name, f"one of {', '.join(map(repr, allowed))}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _bad(self, name, f"an int >= {least}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(self, name, "a bool")
        self._check_objects()
        if self.order is None and self.num_layers_per_chunk is not None:
            raise OptionError(
                "make_graphed_callables: option 'num_layers_per_chunk' needs an order."
            )

    def _check_objects(self) -> None:
        if not isinstance(self.rng_tracker, RNGStatesTracker | None):
            raise _bad(self, "rng_tracker", "a cgpass.RNGStatesTracker or None")
        if not isinstance(self.stream, torch.Stream | None):
            raise _bad(self, "stream", "a torch.cuda.Stream or None")
        if self.pool is not None and not _is_pool(getattr(self.pool, "id", self.pool)):
            raise _bad(
                self, "pool", "a torch.cuda.graph_pool_handle(), a torch.cuda.MemPool or None"
            )

    @classmethod
    def parse(cls, options: "Mapping[str, Any] | GraphedOptions | None") -> "GraphedOptions":
        """Read what a user gave as `options=`.

        Raises:
            OptionError: An unknown name (with the nearest known one) or a bad value.
        """
        if isinstance(options, GraphedOptions):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(
                f"make_graphed_callables: options must be a GraphedOptions or a dict, got {type(options).__name__}."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options or {}:
            if name not in known:
                nearest = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}."
                raise OptionError(f"make_graphed_callables: unknown option {name!r}; {hint}")
        return cls(**(options or {}))


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that `make_graphed_callables` does not have: torch's and TransformerEngine's options."""
    if given:
        known = ", ".join(field.name for field in dataclasses.fields(GraphedOptions))
        raise OptionError(
            f"make_graphed_callables: {', '.join(given)} can't be given as arguments; options are given as "
            f"options=cgpass.GraphedOptions(...): {known}."
        )


def _is_pool(handle: object) -> bool:
    return isinstance(handle, tuple) and [type(part) for part in handle] == [int, int]


def _bad(options: GraphedOptions, name: str, wanted: str) -> OptionError:
    return OptionError(
        f"make_graphed_callables: option {name!r} must be {wanted}, got {getattr(options, name)!r}."
    )
