"""`cgpass.make_graphed_callables`.

Note [Numbers of forwards]
    There is one forward per callable and microbatch, chunk by chunk, microbatch by microbatch within a chunk, layer by
    layer within a microbatch. Backwards come as their forwards did. Without an order there is one chunk and one microbatch.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import torch_private
from cgpass.errors import DriverUnavailableError, GraphedArgumentError, ScheduleError
from cgpass.graphed.binding import Binding
from cgpass.graphed.callables import GraphedFunction, prepared
from cgpass.graphed.modules import Target
from cgpass.graphed.options import GraphedOptions, run_hook
from cgpass.graphed.pair import Pair
from cgpass.options import current_defaults
from cgpass.runtime import native
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import driver_for

log = logging.getLogger(__name__)


def make_graphed_callables(
    callables: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: Sequence[Any],
    *,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    modules: Sequence[Any] = (),
    options: GraphedOptions | Mapping[str, Any] | None = None,
) -> Any:
    """Record forward and backward of modules or functions as CUDA graphs, and return callables that replay them.

    Graphs are recorded in the order in which they will run, all forwards, then the backwards in reverse, or
    `GraphedOptions.order`, and share one memory pool. Calls in another order, and further pending ones, are recorded again;
    these, and callables that keep tensors beside autograd, have pools of their own. Host code does not run on a replay: values
    that a callable reads from anything but tensor arguments, parameters and buffers are frozen, autocast settings included.

    Examples:
        >>> layer = cgpass.make_graphed_callables(torch.nn.Linear(4, 2), (torch.randn(3, 4),))
        >>> layer(torch.ones(3, 4)).sum().backward()
        >>> layer.weight.grad
        tensor([[3., 3., 3., 3.],
                [3., 3., 3., 3.]])

    Args:
        callables: A module, a function, or a tuple of them.
        sample_args: The arguments of one call, as a tuple. For a tuple of callables, one such tuple each (with an order: each
            chunk, microbatch and layer). Nested structures and values that are not tensors are allowed; such values must be
            the same in every call, except flags (`bool`): each combination is recorded. Calls run without a graph if an
            argument requires grad that does not in the sample, or if other arguments are one tensor.
        sample_kwargs: Keyword arguments in the same way.
        modules: The modules that a function uses. Their parameters get gradients; calls check addresses of parameters and
            buffers, and modes. For a tuple of callables one such sequence each. Not needed for a module or a method of one.
        options: Everything else; see `GraphedOptions`.

    Returns:
        A function for each function and a module for each module (a shallow copy of a subclass, which shares parameters,
        buffers and submodules), or a function for each sample if there is an order; a tuple if `callables` is one. Each
        has `reset()`, which frees its graphs until the next call, and `close()`, for good. In another mode (training or eval)
        than recorded it runs without a graph.
        **Lifetime:** results and gradients are the caller's own: no later call changes them.

    Raises:
        GraphedArgumentError: Callables or samples can't be used.
        ScheduleError: The order can't be run, or samples are missing for it.
        OptionError: An unknown option or a bad value.
        DriverUnavailableError: `driver="cuda"` without CUDA.
        HookError: A hook returned something.
        CaptureError: A callable can't be captured; random number states, gradients and buffers are as before.
    """
    given = GraphedOptions._parse(options)
    several = isinstance(callables, tuple)
    fns = callables if isinstance(callables, tuple) else (callables,)
    num_samples = len(fns) if several and given.order is None else None
    args = _each("sample_args", sample_args, (tuple, list), several, num_samples)
    kwargs = [{}] * len(args)
    if sample_kwargs is not None:
        kwargs = _each("sample_kwargs", sample_kwargs, (Mapping,), several, len(args))
    if not fns:
        return ()
    order = (1, -1) if given.order is None else given.order
    numbers, steps = schedule_of(order, len(fns), len(args))
    hooks = given.capture_time_hooks
    hooks = [None] * len(fns) if hooks is None else hooks
    if len(hooks) != len(fns):
        raise GraphedArgumentError(
            f"make_graphed_callables: capture_time_hooks has {len(hooks)} entries for {len(fns)} callables. Give one each, "
            "None where there is nothing to run."
        )
    named = [()] * len(fns)
    if modules or not several:
        named = _each("modules", modules, (tuple, list), several, len(fns))
    copied = given.order is None
    targets = [
        Target(fn, named[i], i if several else None, copied=copied) for i, fn in enumerate(fns)
    ]
    if torch_private.has_function_modes():
        raise GraphedArgumentError(
            "make_graphed_callables: a TorchFunctionMode is active, and would be recorded. Leave its block first."
        )
    device = _device((args, kwargs), targets)
    bindings = [
        Binding(targets[i].name, tuple(args[number]), kwargs[number], device)
        for number, i in enumerate(numbers)
    ]
    owner = _owner(given, device)  # after all that may refuse
    functions = [
        GraphedFunction(targets[i], binding, hooks[i], given, owner)
        for i, binding in zip(numbers, bindings, strict=True)
    ]
    if owner is not None:
        _record(owner, steps, numbers, functions, given)
    results = [
        targets[i].graphed(function) if copied and targets[i].is_module else function
        for i, function in zip(numbers, functions, strict=True)
    ]
    return tuple(results) if several else results[0]


Step = tuple[bool, int]
"""True for a forward, and which one it is, or belongs to. See Note [Numbers of forwards]."""


def schedule_of(
    order: Sequence[int], num_callables: int, num_samples: int
) -> tuple[list[int], list[Step]]:
    """List each forward's callable, and all steps in order, of a pipeline whose chunks have as many callables each.

    Raises:
        ScheduleError: The order can't be run, or these are not as many callables and samples as it takes.
    """
    if not isinstance(order, Sequence) or isinstance(order, str) or not order:
        raise ScheduleError(
            "make_graphed_callables: order must be a sequence of chunk numbers, positive for a forward and negative "
            f"for a backward, got {order!r}."
        )
    total = Counter[int]()
    for position, entry in enumerate(order):
        why = "a backward before the forward that it belongs to"
        if type(entry) is not int or not entry:
            why = "chunks are ints from 1, negative for a backward"
        elif total[entry] < total[-entry] or entry > 0:
            total[entry] += 1
            continue
        raise ScheduleError(f"make_graphed_callables: order[{position}] is {entry!r}: {why}.")
    num_chunks, num_microbatches = max(map(abs, order)), total[1]
    for chunk in range(1, num_chunks + 1):
        if not total[chunk] == total[-chunk] == num_microbatches:
            raise ScheduleError(
                f"make_graphed_callables: order has {total[chunk]} forwards and {total[-chunk]} backwards of chunk {chunk}, "
                f"{num_microbatches} forwards of chunk 1. Every chunk runs every microbatch, and chunks are numbered without gaps."
            )
    layers, rest = divmod(num_callables, num_chunks)
    if rest or num_samples != num_callables * num_microbatches:
        raise ScheduleError(
            f"make_graphed_callables: {num_callables} callables, but {num_samples} samples, for {num_chunks} chunks and "
            f"{num_microbatches} microbatches. Give as many callables for each chunk, and a sample for each microbatch of "
            "each callable."
        )
    per_chunk, done = layers * num_microbatches, Counter[int]()
    steps: list[Step] = []
    for entry in order:
        first = (abs(entry) - 1) * per_chunk + done[entry] * layers
        numbers = range(first, first + layers)
        steps += [(entry > 0, n) for n in (numbers if entry > 0 else reversed(numbers))]
        done[entry] += 1
    return [n // per_chunk * layers + n % layers for n in range(num_samples)], steps


def _record(
    owner: Owner,
    steps: Sequence[Step],
    numbers: Sequence[int],
    functions: list[GraphedFunction],
    options: GraphedOptions,
) -> None:
    """Warm every forward up, with its backward, and record all, with what is held meanwhile as in a training step.

    Results and saved tensors are held until their backward, gradients until the next one, and those of each callable's
    first backward to the end: whatever is recorded meanwhile lies elsewhere.
    """
    grads: dict[int, Any] = {}
    try:
        with prepared(options, owner.driver.device), owner.lock:
            pairs = [Pair(each, owner, each.binding.flags, in_order=True) for each in functions]
            run_hook(options.warmup_hooks, "pre_warmup")
            try:
                for is_forward, number in steps:
                    if is_forward:
                        pairs[number].warm_up(options.num_warmup_iters)
            finally:
                run_hook(options.warmup_hooks, "post_warmup")
            for is_forward, number in steps:
                if is_forward:
                    pairs[number].record_forward()
                    continue
                found = grads[-1] = pairs[number].record_backward()
                grads.setdefault(numbers[number], found)
            for function, pair in zip(functions, pairs, strict=True):
                function.add(pair)
    except BaseException:
        mend(open_modes)
        owner.close()
        raise


def _each(
    what: str, given: Any, kinds: tuple[type, ...], several: bool, count: int | None = None
) -> list[Any]:
    """Return the given values, one for each callable or sample."""
    found = given if several else [given]
    fits = isinstance(found, tuple | list) and all(isinstance(each, kinds) for each in found)
    if not fits or (count is not None and len(found) != count):
        form = f"a {kinds[0].__name__.lower()}" + " for each callable or sample" * several
        form += "" if count is None or not several else f", {count} in all"
        entries = [type(each).__name__ for each in found] if isinstance(found, tuple | list) else []
        raise GraphedArgumentError(
            f"make_graphed_callables: {what} must be {form}, got {', '.join(entries) or type(given).__name__}."
        )
    return list(found)


def _device(samples: Any, targets: Sequence[Target]) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(samples) if isinstance(leaf, torch.Tensor)]
    for module in [module for target in targets for module in target.modules]:
        tensors += [*module.parameters(), *module.buffers()]
    if not tensors:
        raise GraphedArgumentError(
            "make_graphed_callables: neither samples nor modules have a tensor that would tell the device."
        )
    return tensors[0].device


def _owner(options: GraphedOptions, device: torch.device) -> Owner | None:
    """Return the owner of the recordings; None if nothing is to be recorded."""
    pool = getattr(options.pool, "id", options.pool)
    try:
        driver = driver_for(options.driver, device, pool=pool, stream=options.stream)
    except DriverUnavailableError as error:
        raise DriverUnavailableError(f"make_graphed_callables: {error}") from None
    if driver is None:
        if options.driver == "auto":
            log.warning(
                "make_graphed_callables: calls run without a graph, since modules and samples are on %s. Move them to CUDA, "
                'or simulate graphs on the CPU with GraphedOptions(driver="simulated").',
                device,
            )
        return None
    return Owner(driver) if native.loader.wait(current_defaults().progress) else None
