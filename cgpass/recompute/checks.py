"""What `cgpass.checkpoint` is called with, checked before anything runs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils.checkpoint import noop_context_fn

from cgpass.errors import CheckpointArgumentError
from cgpass.recompute.tracker import RNGStatesTracker

CHECKS: Final = ("default", "none")
TORCHS_SETTINGS: Final = ("preserve_rng_state", "early_stop", "debug")
"""Arguments of `torch.utils.checkpoint.checkpoint` that are none of `cgpass.checkpoint`'s."""


def require_usable(
    fn: object,
    determinism_check: object,
    context_fn: object,
    use_reentrant: object,
    tracker: object,
) -> None:
    """Raise unless the arguments are of the right kinds and go together."""
    if not callable(fn):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: fn must be callable, got {type(fn).__name__}. Pass the function and its arguments, "
            f"checkpoint(fn, x), not its result, checkpoint(fn(x))."
        )
    if not isinstance(use_reentrant, bool):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: use_reentrant must be True or False, got {use_reentrant!r}."
        )
    if determinism_check not in CHECKS:
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: determinism_check must be one of 'default', 'none', got {determinism_check!r}."
        )
    if use_reentrant and context_fn is not noop_context_fn:
        raise CheckpointArgumentError(
            "cgpass.checkpoint: context_fn works with use_reentrant=False only. Leave one of the two out."
        )
    if tracker is not None and not isinstance(tracker, RNGStatesTracker):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: rng_tracker must be a cgpass.RNGStatesTracker or None, got {type(tracker).__name__}."
        )


def require_wanted(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if keyword arguments look like settings of torch's checkpoint rather than arguments of `fn`.

    A function that only has `**kwargs` would swallow them without a word.
    """
    for name in TORCHS_SETTINGS:
        if name in kwargs and not _names(fn, name):
            raise CheckpointArgumentError(
                f"cgpass.checkpoint: {name} is a setting of torch.utils.checkpoint that cgpass.checkpoint doesn't have "
                f"(random numbers are always preserved, recomputations always end early), and fn has no argument of "
                f"that name. Leave it out; if fn shall have it, pass functools.partial(fn, {name}=...)."
            )


def _names(fn: Callable[..., Any], name: str) -> bool:
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return name in inspect.signature(called).parameters
    except (TypeError, ValueError):  # a builtin may have none
        return True


def bound(
    fn: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`fn` with those of its arguments that torch's checkpoint would take for its own, and the others."""
    own = {name: value for name, value in kwargs.items() if name in TORCHS_SETTINGS}
    if not own:
        return fn, kwargs
    others = {name: value for name, value in kwargs.items() if name not in TORCHS_SETTINGS}
    return functools.partial(fn, **own), others
