"""`cgpass.checkpoint`."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import noop_context_fn

from cgpass import torch_private
from cgpass.errors import CheckpointArgumentError
from cgpass.recompute import nonreentrant, reentrant
from cgpass.recompute.ambient import Ambient
from cgpass.recompute.checks import bound, require_usable, require_wanted
from cgpass.recompute.inputs import Arguments, devices_of
from cgpass.recompute.numbers import remember
from cgpass.recompute.tracker import RNGStatesTracker

log = logging.getLogger(__name__)


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    determinism_check: str = "default",
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    rng_tracker: RNGStatesTracker | None = None,
    **kwargs: Any,
) -> Any:
    """Run `fn(*args, **kwargs)` without keeping what its backward needs; the backward runs `fn` again for it.

    The recomputation draws the random numbers that the forward drew, under the autocast settings and the default
    device of the forward, and leaves the generators where they were. This also holds while a CUDA graph is being
    captured, if it is a `cgpass.CheckpointedGraph`. In a function that `torch.compile` compiles, this is
    `torch.utils.checkpoint.checkpoint`. Inside transforms of `torch.func` and forward-mode AD `fn` runs plainly.

    Args:
        fn: Any function or module; it must compute the same both times. Module hooks run both times.
        *args: Its arguments, tensors in nested tuples, lists and dictionaries included. None need require grad.
        use_reentrant: False: saved tensors are dropped one by one and the recomputation ends with the last that is
            needed. True: `fn` runs without a graph, its backward runs all of `fn` with one and `backward()` through
            it; the floating point tensors it returns then require grad always, and neither `torch.autograd.grad`
            nor `backward(inputs=...)` may go through.
        determinism_check: "default": shape, dtype and device of each recomputed tensor are compared with the
            forward's. "none": they aren't. Without meaning for `use_reentrant=True`.
        context_fn: Returns two context managers, for the forward and for the recomputation (entered again for each
            backward pass), as `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them.
        rng_tracker: Whose states `fn` draws from beside the default ones.
        **kwargs: Keyword arguments of `fn`. The settings of torch's checkpoint that this one doesn't have,
            `preserve_rng_state`, `early_stop` and `debug`, are refused unless `fn` names them among its own.

    Returns:
        What `fn` returns. **Lifetime:** the caller's own; until the backward is done or the graph dropped, the
        graph holds the tensors among the arguments, which must not be changed in place.

    Raises:
        CheckpointArgumentError: An argument is of a wrong kind, or two don't go together.
        CheckpointError: In the backward: the recomputation gave other tensors, or something that was freed was
            needed again. In a capture: random numbers that the recomputation could not draw again.
    """
    require_usable(fn, determinism_check, context_fn, use_reentrant, rng_tracker)
    if torch.compiler.is_compiling() and rng_tracker is None:
        require_wanted(fn, kwargs)
        fn, kwargs = bound(fn, kwargs)
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = context_fn
        return torchs.checkpoint(
            fn, *args, use_reentrant=use_reentrant, determinism_check=determinism_check, **kwargs
        )
    if torch.compiler.is_compiling():
        return torch_private.outside_dynamo(_checkpoint)(
            fn, args, kwargs, use_reentrant, determinism_check, context_fn, rng_tracker
        )
    return _checkpoint(fn, args, kwargs, use_reentrant, determinism_check, context_fn, rng_tracker)


def _checkpoint(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool,
    determinism_check: str,
    context_fn: Callable[[], tuple[Any, Any]],
    tracker: RNGStatesTracker | None,
) -> Any:
    require_wanted(fn, kwargs)
    if torch_private.in_functorch() or torch_private.in_forward_ad():
        _warn_of_plain_run()
        return fn(*args, **kwargs)
    forward_context, context = _contexts(context_fn)
    if not torch.is_grad_enabled():
        with forward_context:
            return fn(*args, **kwargs)
    arguments = Arguments(args, kwargs)
    devices = devices_of(arguments.tensors)
    numbers = remember(devices, tracker)
    ambient = Ambient.now(devices)
    if use_reentrant:
        return reentrant.run(
            reentrant.Call(fn, arguments, numbers, ambient), lambda: fn(*args, **kwargs)
        )
    frame = nonreentrant.Checkpoint(
        fn,
        arguments,
        numbers=numbers,
        ambient=ambient,
        context=context,
        check=determinism_check == "default",
    )
    return nonreentrant.run(frame, lambda: fn(*args, **kwargs), forward_context, numbers)


def _contexts(
    context_fn: Callable[[], tuple[Any, Any]],
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    pair = context_fn() if callable(context_fn) else context_fn
    if not isinstance(pair, tuple) or len(pair) != 2:
        got = type(pair).__name__
    elif all(isinstance(context, contextlib.AbstractContextManager) for context in pair):
        return pair
    else:
        got = ", ".join(type(context).__name__ for context in pair)
    raise CheckpointArgumentError(
        f"cgpass.checkpoint: context_fn must be a function that returns two context managers, for the forward "
        f"and for the recomputation, got {got}."
    )


@functools.cache
def _warn_of_plain_run() -> None:
    log.warning(
        "cgpass.checkpoint: inside transforms of torch.func and forward-mode AD the function runs as it is: nothing is "
        "recomputed, no memory is saved, values and gradients are right."
    )
