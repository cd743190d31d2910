"""`GraphedOptions`: how `make_graphed_callables` warms up and records, and the hooks around that.

Note [When hooks run]
    Outside of what is captured, on the stream that is current where something is recorded: once for each warm-up and once
    for the capture, `pre_backward` and `backward` where there is a backward. Parameters that they move are left as they
    leave them, but for a call that records again, which has them as they were. Warm-up hooks don't run then.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cgpass.errors import GraphedArgumentError, HookError, OptionError
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

    pool: Any = None
    """Memory pool of the graphs (`torch.cuda.graph_pool_handle()`, a `torch.cuda.MemPool`); one of their own if None."""

    stream: Any = None
    """`torch.cuda.Stream` of warm-ups and captures; one of their own if None."""

    order: Sequence[int] | None = None
    """Pipeline schedule: chunk numbers from 1, positive for a forward, negative for a backward. All chunks have as many
    callables."""

    capture_time_hooks: Sequence[Hooks | None] | None = None
    """One entry per callable: what runs around its warm-ups and captures, never on a replay."""

    warmup_hooks: Hooks | None = None
    """What runs around all warm-ups, once."""

    max_rerecords: int = 16
    """Recordings made because parameters moved, or since tensors that are kept beside autograd wait for their backward,
    before further calls of that kind run without a graph."""

    rng_tracker: RNGStatesTracker | None = None
    """Whose states the callables draw from beside the default ones."""

    driver: Literal["auto", "cuda", "simulated", "none"] = "auto"
    """What records and replays; `auto`: `cuda` where the samples lie on CUDA, else `none`."""

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _CHECKS.items():
            value = getattr(self, name)
            if not fits(value):
                raise OptionError(
                    f"make_graphed_callables: option {name!r} must be {wanted}, got {value!r}."
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


# ---- hooks

CAPTURE_TIME = ("pre_forward", "forward", "pre_backward", "backward")
WARM_UP = ("pre_warmup", "post_warmup")


class HookSet:
    """The functions that one callable has for each moment."""

    def __init__(self, hooks: object, names: Sequence[str], where: str) -> None:
        """Check what a user gave: `names` are the moments that there are, `where` is for messages.

        Raises:
            GraphedArgumentError: No mapping, an unknown name, or something that can't be called.
        """
        self._where = where
        self._functions: dict[str, Any] = dict(hooks) if isinstance(hooks, Mapping) else {}
        unknown = self._functions.keys() - names
        if not isinstance(hooks, Mapping | None) or unknown:
            got = f"has an unknown hook {unknown.pop()!r}" if unknown else f"is {hooks!r}"
            raise GraphedArgumentError(
                f"make_graphed_callables: {where} {got}; give functions in a dict with the names {', '.join(names)}, or None."
            )
        for name, function in self._functions.items():
            if not callable(function):
                raise GraphedArgumentError(
                    f"make_graphed_callables: {where}[{name!r}] must be a function, got {type(function).__name__}."
                )

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._functions)

    def run(self, name: str, *args: Any) -> None:
        """Call the function of one moment.

        Raises:
            HookError: It returned something.
        """
        function = self._functions.get(name)
        result = None if function is None else function(*args)
        if result is not None:
            raise HookError(
                f"make_graphed_callables: {self._where}[{name!r}] returned a {type(result).__name__}. Hooks can't replace "
                "arguments or results: have it return None."
            )


def capture_time_hooks(hooks: Any, num_callables: int) -> list[HookSet]:
    """One set per callable.

    Raises:
        GraphedArgumentError: Another number of entries than callables, or as for `HookSet`.
    """
    hooks = [None] * num_callables if hooks is None else hooks
    if not isinstance(hooks, list | tuple) or len(hooks) != num_callables:
        raise GraphedArgumentError(
            f"make_graphed_callables: capture_time_hooks must be a list with one entry for each of the {num_callables} "
            f"callables, None where there is nothing to run, got {hooks!r}."
        )
    return [HookSet(each, CAPTURE_TIME, f"capture_time_hooks[{i}]") for i, each in enumerate(hooks)]
