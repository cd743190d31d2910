"""`explain`: runs a function and reports what was captured of it, what was not, and why."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from cgpass import telemetry, torch_private
from cgpass.backend import cgpass
from cgpass.errors import OptionError
from cgpass.options import set_defaults
from cgpass.report import frames
from cgpass.report.arguments import arguments_of, options_of, refusals_told
from cgpass.report.calls import Calls
from cgpass.report.collect import Measured, called, collect, with_times
from cgpass.report.measure import (
    RUNS,
    live_runs,
    main_device,
    plainly,
    profiled,
    timed,
)
from cgpass.report.model import Report
from cgpass.report.outside import with_outside
from cgpass.report.reached import Called, reaches_compiled
from cgpass.report.state import State
from cgpass.runtime import native
from cgpass.runtime.owner import Owner

_CALLS: Final = 8
"""Calls, besides warm-ups, until nothing new is to be recorded."""
_CHANGES: Final = ("graphs", "warmups", "recordings")


def explain(
    fn: Callable[..., Any] | torch.nn.Module, /, *args: Any, training: bool = True, **kwargs: Any
) -> Report:
    """Run a function, and say what of it CUDA graphs hold, what not, for which reason and at which line.

        print(cgpass.explain(model, batch))
        cgpass.explain(model, batch).save("report.html")

    What is not compiled yet is compiled with `backend="cgpass"`, anew in each explain; options are given as
    `options={...}` or by `cgpass.set_defaults`. A batch by itself is given as data loaders mean it: a mapping by name
    (`**batch`) if the function takes these names, a tuple or list as `*batch` if it takes more than one argument and
    these. What `torch.compile` returned, and modules some of whose
    submodules are compiled, run as they are. Up to 8 calls (and warm-ups) run until nothing new is recorded, then 6
    with CUDA graphs and 6 without them, and on CUDA one under `torch.profiler`; `cgpass.counters()` counts all but
    those without.

    Tensors among the arguments are handed on as copies that lie elsewhere in every call, as a training loop's do;
    parameters, tensors marked static and those that a module holds are not. Tensors of whole numbers among the latter (the
    position in a cache, say; of up to 1 MiB) are put back before each call: all calls are the one that would come next.

    Afterwards all is put back as it was, also when the function raises: parameters, buffers and tensors that modules
    and closures hold (bits, memory and objects), gradients, other attributes of modules with the lists, dictionaries,
    sets and objects of users' classes among them, such objects, modules and optimizers among the arguments, states and
    groups of `torch.optim` optimizers, random number states. It is kept in host memory meanwhile. Parameters of lazy
    modules are initialised afterwards. What else the function changes (globals that it binds anew, lists and
    dictionaries that no module and no such object holds, schedulers, scalers, files) stays changed.

    Args:
        fn: A module or function, compiled or not.
        args: Of one call.
        training: Whether to run a backward, too: of the result's loss if it has one, else of all that it returns that
            requires grad, with gradients of ones; a function that ran it itself, as a training step does, is left
            alone. If not, calls run under `torch.no_grad()`. Modules keep their mode.
        kwargs: Of one call, by name.

    Returns:
        A report; `print` shows it. Functions that `torch.compile` left to eager are named beside those that it compiled.

    Raises:
        OptionError: Options of `cgpass.Options` by themselves, which belong into `options=`; `options=` for what is
            compiled already.
        InputError: The function does not take the batch in any of these ways.
        Exception: Whatever the function raises, as it is.
    """
    options = options_of(fn, kwargs)
    args, kwargs = arguments_of(fn, args, kwargs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(refusals_told(fn, args, kwargs))
        before = stack.enter_context(frames.noted())
        call = Called(fn, args, kwargs)
        is_compiled = reaches_compiled(call)
        if options and is_compiled:
            raise OptionError(
                "cgpass.explain: what is compiled already has its options; give them to torch.compile instead"
            )
        stack.enter_context(set_defaults(**options))
        run = fn if is_compiled else stack.enter_context(_compiled(fn))
        state = State(call)
        stack.callback(state.put_back)
        calls = Calls(run, args, kwargs, state, training=training)
        watch = frames.Watch(before, frames.codes_of(call.values))
        report = _observe(calls, state.devices | calls.devices, watch)
        left = frames.left_to_eager(before, again=watch.given_up)
        if not (left or report.functions):
            left = frames.at_limit()
        return with_outside(report, left, watch.graph_breaks())


@contextlib.contextmanager
def _compiled(fn: Callable[..., Any] | torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """What `torch.compile` makes of it with the options of now; afterwards nothing of it is left."""
    before = telemetry.counters()["graphs"]
    with torch_private.backend_for_once(cgpass) as backend:
        torch_private.note_graph_breaks()  # Dynamo is loaded by now
        try:
            yield torch.compile(fn, backend=backend)
        finally:
            for owner in _owners(since=before):
                owner.release()


def _observe(calls: Calls, devices: set[torch.device], watch: frames.Watch) -> Report:
    measured = Measured(settled=_settle(calls, watch), runs=RUNS)
    if native.loader.status is not None:  # where nothing was recorded yet
        native.loader.wait()
    measured.captured = timed(calls, devices)
    numbers = called(measured.captured)
    owners = _owners(among=numbers)
    found = {owner.driver.device for owner in owners} - devices
    if found:  # it was given nothing there
        devices |= found
        measured.captured = timed(calls, devices)
    measured.settled = measured.settled and not measured.captured.warmups
    measured.device = main_device(devices)
    if measured.device.type == "cuda":
        measured.launches = profiled(calls, devices)
    functions = collect(numbers)
    with plainly(owners):
        measured.plain = timed(calls, devices)
    return with_times(functions, measured)


def _settle(calls: Calls, watch: frames.Watch) -> bool:
    """Call until two calls in a row recorded and compiled nothing; returns whether they did in the end."""
    quiet = 0
    for number in range(_CALLS):
        before = telemetry.counters()
        with watch.watching() if number else contextlib.nullcontext():  # compiled by now
            calls()
        after = telemetry.counters()
        quiet = quiet + 1 if all(before[name] == after[name] for name in _CHANGES) else 0
        if quiet == 2:
            return True
    return False


def _owners(*, since: int = 0, among: frozenset[int] | None = None) -> list[Owner]:
    """Owners of what lives of the graphs from some number on, or of some graphs."""
    found = {
        id(live.owner): live.owner
        for number, _, live in live_runs()
        if number >= since and (among is None or number in among) and live.owner is not None
    }
    return list(found.values())
