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

from cgpass.errors import HookError, OptionError
from cgpass.options import Options
from cgpass.recompute.tracker import RNGStatesTracker

Hooks: TypeAlias = Mapping[str, Callable[..., None]]
"""Functions, by name of the moment."""


@dataclass(frozen=True, kw_only=True)
class GraphedOptions:
    """Settings of one call of `make_graphed_callables`.

    Examples:
        >>> options = cgpass.GraphedOptions(num_warmup_iters=1)
        >>> layer = cgpass.make_graphed_callables(torch.nn.Linear(4, 2), (torch.ones(3, 4),), options=options)
        >>> layer(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Raises:
        OptionError: A field has a value that is not allowed.
    """

    num_warmup_iters: int = 3
    """Plain runs of forward and backward before each callable is recorded, at least one."""

    pool: Any = None
    """Memory pool of graphs in the order of the recordings (`torch.cuda.graph_pool_handle()`, a `torch.cuda.MemPool`); one of
    their own if None."""

    stream: Any = None
    """`torch.cuda.Stream` of warm-ups and captures; one of their own if None."""

    order: Sequence[int] | None = None
    """Pipeline schedule: chunk numbers from 1, positive for a forward, negative for a backward. All chunks have as many
    callables."""

    capture_time_hooks: Sequence[Hooks | None] | None = None
    """One entry per callable: what runs around its warm-ups and captures, never on a replay."""

    warmup_hooks: Hooks | None = None
    """Hooks that run around all warm-ups, once."""

    max_rerecords: int = 16
    """Recordings made because parameters moved, for other flags, or while earlier calls wait for their backward, before
    further calls of that kind run without a graph."""

    rng_tracker: RNGStatesTracker | None = None
    """Tracker of states that the callables draw from, beside the default ones."""

    driver: Literal["auto", "cuda", "simulated", "none"] = "auto"
    """Records and replays; `auto`: `cuda` where the samples lie on CUDA, else `none`."""

    def __post_init__(self) -> None:
        Options(driver=self.driver)  # which checks it
        hooks = self.capture_time_hooks
        each = hooks if isinstance(hooks, list | tuple) else []
        checks = {
            "num_warmup_iters": (_is_count(self.num_warmup_iters, 1), "an int >= 1"),
            "max_rerecords": (_is_count(self.max_rerecords, 0), "an int >= 0"),
            "rng_tracker": (
                isinstance(self.rng_tracker, RNGStatesTracker | None),
                "a cgpass.RNGStatesTracker or None",
            ),
            "capture_time_hooks": (
                hooks in (None, each) and all(_are_hooks(CAPTURE_TIME, one) for one in each),
                f"a list of None or functions in a dict with some of the names {', '.join(CAPTURE_TIME)}",
            ),
            "warmup_hooks": (
                _are_hooks(WARM_UP, self.warmup_hooks),
                f"functions in a dict with some of the names {', '.join(WARM_UP)}",
            ),
        }
        for name, (fits, wanted) in checks.items():
            if not fits:
                raise OptionError(
                    f"make_graphed_callables: option {name!r} must be {wanted}, got {getattr(self, name)!r}."
                )

    @classmethod
    def _parse(cls, options: "Mapping[str, Any] | GraphedOptions | None") -> "GraphedOptions":
        """Read the user's `options=`.

        Raises:
            OptionError: An unknown name or a bad value.
        """
        if isinstance(options, GraphedOptions):
            return options
        known = [field.name for field in dataclasses.fields(cls)]
        given = {} if options is None else options
        if not isinstance(given, Mapping) or not given.keys() <= {*known}:
            raise OptionError(
                f"make_graphed_callables: options must be a GraphedOptions or a dict with some of the names "
                f"{', '.join(known)}, got {options!r}."
            )
        return cls(**given)


CAPTURE_TIME = ("pre_forward", "forward", "pre_backward", "backward")
WARM_UP = ("pre_warmup", "post_warmup")


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _are_hooks(names: Sequence[str], value: Any) -> bool:
    given = {} if value is None else value
    return (
        isinstance(given, Mapping) and {*given} <= {*names} and all(map(callable, given.values()))
    )


def run_hook(hooks: Hooks | None, name: str, *args: Any) -> None:
    """Call the function of one moment.

    Raises:
        HookError: It returned something.
    """
    function = (hooks or {}).get(name)
    result = None if function is None else function(*args)
    if result is not None:
        raise HookError(
            f"make_graphed_callables: the hook {name!r} returned a {type(result).__name__}. Hooks can't replace arguments or "
            "results: have it return None."
        )
