"""`cgpass.checkpoint`."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import noop_context_fn

from cgpass import torch_private
from cgpass.errors import CheckpointArgumentError
from cgpass.recompute.checkpointed import Arguments, Checkpoint
from cgpass.recompute.states import Numbers
from cgpass.recompute.tracker import RNGStatesTracker

log = logging.getLogger(__name__)
_warn_once: Final = functools.cache(log.warning)
TORCHS_SETTINGS: Final = ("preserve_rng_state", "early_stop", "debug")
"""Arguments of `torch.utils.checkpoint.checkpoint` that are none of `cgpass.checkpoint`'s."""


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    determinism_check: str = "default",
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    rng_tracker: RNGStatesTracker | None = None,
    **kwargs: Any,
) -> Any:
    """Run `fn(*args, **kwargs)` without keeping the tensors that its backward needs; the backward runs `fn` again for them.

    The recomputation draws the same random numbers as the forward, under the forward's autocast settings and default device,
    and leaves the generators where they were. This also holds while a `cgpass.CheckpointedGraph` is being captured. In a
    function that `torch.compile` compiles, this is `torch.utils.checkpoint.checkpoint`. Inside transforms of `torch.func` and
    forward-mode AD `fn` runs as it is.

    Examples:
        >>> x = torch.ones(100, requires_grad=True)
        >>> y = cgpass.checkpoint(torch.nn.functional.dropout, x)
        >>> y.sum().backward()
        >>> torch.equal(x.grad, y)  # both dropped the same elements
        True

    Args:
        fn: Any function or module; it must compute the same both times. Module hooks run both times.
        *args: Its arguments, with tensors in nested tuples, lists and dictionaries. None need require grad.
        use_reentrant: Accepted for compatibility with torch's checkpoint; it has no effect. Saved tensors are dropped one by
            one, the recomputation ends with the last one needed, and every kind of backward works.
        determinism_check: "default" compares shape, dtype and device of each recomputed tensor with the forward's. "none"
            doesn't.
        context_fn: Returns two context managers, for the forward and for the recomputation (entered again for each
            backward pass), as `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them.
        rng_tracker: A tracker whose states `fn` draws from, besides the default ones.
        **kwargs: Keyword arguments of `fn`. Settings of torch's checkpoint that this one doesn't have,
            `preserve_rng_state`, `early_stop` and `debug`, are refused unless `fn` has arguments with these names.

    Returns:
        The result of `fn`. **Lifetime:** the caller's own. Until the backward is done or the graph dropped, the graph holds the
        tensors among the arguments; don't change them in place.

    Raises:
        CheckpointArgumentError: An argument is of a wrong kind.
        CheckpointError: In the backward: the recomputation gave other tensors, or needed a tensor that was freed. In a
            capture: the recomputation could not repeat random numbers.
    """
    del use_reentrant
    _require_usable(fn, kwargs, determinism_check, rng_tracker)
    if not torch.compiler.is_compiling():
        return _checkpoint(fn, args, kwargs, determinism_check, context_fn, rng_tracker)
    if rng_tracker is not None:
        outside = torch_private.outside_dynamo(_checkpoint)
        return outside(fn, args, kwargs, determinism_check, context_fn, rng_tracker)
    settings: dict[str, Any] = {"determinism_check": determinism_check}
    if context_fn is not noop_context_fn:
        settings["context_fn"] = context_fn
    # bound, lest torch's checkpoint takes some for its own
    bound = functools.partial(fn, **kwargs) if kwargs else fn
    return torchs.checkpoint(bound, *args, use_reentrant=False, **settings)


def _checkpoint(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    determinism_check: str,
    context_fn: Callable[[], tuple[Any, Any]],
    tracker: RNGStatesTracker | None,
) -> Any:
    if torch_private.in_functorch() or torch_private.in_forward_ad():
        _warn_once(
            "cgpass.checkpoint: inside transforms of torch.func and forward-mode AD the function runs as it is: nothing is "
            "recomputed, no memory is saved, values and gradients are right."
        )
        return fn(*args, **kwargs)
    forward_context, context = context_fn()
    if not torch.is_grad_enabled():
        with forward_context:
            return fn(*args, **kwargs)
    arguments = Arguments(args, kwargs)
    numbers = Numbers(arguments.devices, tracker)
    frame = Checkpoint(fn, arguments, numbers, context, check=determinism_check == "default")
    with frame.hooks(), numbers.forward(), forward_context:
        return fn(*args, **kwargs)


def _require_usable(
    fn: object, kwargs: Mapping[str, Any], determinism_check: object, tracker: object
) -> None:
    if not callable(fn):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: fn must be callable, got {type(fn).__name__}. Pass the function and its arguments, "
            f"checkpoint(fn, x), not its result, checkpoint(fn(x))."
        )
    if determinism_check not in ("default", "none"):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: determinism_check must be one of 'default', 'none', got {determinism_check!r}."
        )
    if tracker is not None and not isinstance(tracker, RNGStatesTracker):
        raise CheckpointArgumentError(
            f"cgpass.checkpoint: rng_tracker must be a cgpass.RNGStatesTracker or None, got {type(tracker).__name__}."
        )
    for name in TORCHS_SETTINGS:
        if name in kwargs and not _names(fn, name):  # a fn with **kwargs would swallow it
            raise CheckpointArgumentError(
                f"cgpass.checkpoint: {name} is a setting of torch.utils.checkpoint that cgpass.checkpoint doesn't have "
                f"(random numbers are always preserved, recomputations always end early), and fn has no argument of "
                f"that name. Leave it out; if fn needs it, pass functools.partial(fn, {name}=...)."
            )


def _names(fn: Callable[..., Any], name: str) -> bool:
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return name in inspect.signature(called).parameters
    except (TypeError, ValueError):  # a builtin may have none
        return True
