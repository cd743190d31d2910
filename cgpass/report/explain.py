"""`explain`: reports on the calls of a block, or on calls that it makes itself."""

import collections
import contextlib
import copy
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import torch
from torch.utils import _pytree as pytree

from cgpass import telemetry, torch_private
from cgpass.backend import cgpass
from cgpass.errors import InputError, OptionError
from cgpass.options import current_defaults, set_defaults
from cgpass.report import watch
from cgpass.report.report import Report
from cgpass.runtime import native
from cgpass.runtime.inputs import overlaps_itself
from cgpass.runtime.writes import bits
from cgpass.whole_step import TrainStep

Fn = Callable[..., Any] | torch.nn.Module

_CALLS: Final = 9
_GRAPH_IS_GONE: Final = "Trying to backward through the graph a second time"
"""Autograd's message for results of a function that ran their backward itself."""


@overload
def explain() -> contextlib.AbstractContextManager[Report]: ...
@overload
def explain(
    fn: Fn,
    /,
    *args: Any,
    training: bool = True,
    compare: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report: ...
def explain(
    fn: Fn | None = None,
    /,
    *args: Any,
    training: bool = True,
    compare: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report | contextlib.AbstractContextManager[Report]:
    """Report which parts of some calls ran in CUDA graphs, which did not, why, at which line, and what to do.

    Examples:
        >>> model, batch = torch.nn.Linear(4, 4), torch.randn(2, 4)
        >>> report = cgpass.explain(model, batch)  # print it, or report.save("report.html")
        >>> captured, all_operators = report.work
        >>> captured == all_operators
        True
        >>> with cgpass.explain() as report:  # watches calls of your own
        ...     torch.compile(model, backend="cgpass")(batch).sum().backward()
        >>> [graph.direction for graph in report.graphs]
        ['forward', 'backward']

    A block runs nothing itself and changes nothing. Calls of other threads count, too. The report is ready when it ends.

    With a function, nine calls run, with their backward. If it is not compiled yet, it is compiled with `backend="cgpass"`. A
    single batch is passed as data loaders mean it: a mapping as `**batch`, a tuple or list as `*batch`; `[batch]` passes
    it whole. Afterwards parameters, buffers, gradients, optimizers and scalers that the function is, receives or names
    are restored, and so are torch's random numbers. Nothing else is: attributes, caches, schedulers, written arguments.
    If this compiled the function, recordings of the same code are freed, also those that calls of yours made before.
    Calls begin without gradients, but those of an optimizer's own `step`: watch code that reads gradients with a block.

    Args:
        fn: A module or function, compiled or not; leave it out for a block.
        args: The arguments of one call.
        training: True to run a backward, too: of the result's loss if it has one, else of all results that require grad,
            unless the function ran it itself. False to run calls under `torch.no_grad()`.
        compare: True to time calls with CUDA graphs and without, afterwards.
        optimizer: Restored, too, if the function does not name it.
        options: Fields of `cgpass.Options`, for a function that is not compiled yet.
        kwargs: The keyword arguments of one call.

    Returns:
        A report; `print` shows it, `save` makes a page of it. For a block, a context manager that gives one.

    Raises:
        OptionError: `options=` for a function that is compiled already.
        InputError: No function, and arguments.
        Exception: Whatever the function raises, as it is.
    """
    if fn is None:
        if args or kwargs or options or compare or optimizer is not None or not training:
            raise InputError("cgpass.explain: arguments need a function first, got None")
        return watch.watched()
    _check(fn, optimizer)
    args, kwargs = _spread(args, kwargs)
    given = [fn, inspect.unwrap(fn), *pytree.tree_leaves((args, kwargs, optimizer))]
    values = [value for each in given for value in _reached(each)]
    modules = [*dict.fromkeys(each for each in values if isinstance(each, torch.nn.Module))]
    kinds = torch.nn.Module | types.FunctionType
    is_compiled = any(
        isinstance(each, TrainStep) or (isinstance(each, kinds) and torch_private.is_compiled(each))
        for each in values
    )
    if options and is_compiled:
        raise OptionError(
            "cgpass.explain: a compiled function has its options already; pass them to torch.compile instead"
        )
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    tensors += [t for m in modules for t in (*m.parameters(False), *m.buffers(False))]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    run = fn
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_defaults(**options or {}))
        stack.enter_context(torch.random.fork_rng([*devices]))
        _put_back(stack, tensors, values)
        for step in (value for value in values if isinstance(value, TrainStep)):
            stack.callback(setattr, step, "_due", step._due)
        # Dynamo would find what a disabled function wraps
        if not (is_compiled or torch_private.is_disabled(fn)):
            before = telemetry.now()
            run = torch.compile(fn, backend=cgpass, options=dict(options or {}))
            torch_private.note_graph_breaks()  # Dynamo is loaded by now
            stack.callback(lambda: [owner.release() for owner in watch.owners(before)])
        call = functools.partial(_call, functools.partial(run, *args, **kwargs), training, tensors)
        with watch.watched() as report:
            for _ in range(_CALLS):
                call()
            if native.loader.status is not None:  # where nothing was recorded yet
                native.loader.wait(current_defaults().progress)
        report.model = _name_of(fn)
        if compare and report.device != watch.SIMULATED:
            report.ms, report.plain_ms = watch.compared(call)
        return report


def _check(fn: Any, optimizer: Any) -> None:
    if not callable(fn):
        raise InputError(f"cgpass.explain takes a module or function, got a {type(fn).__name__}")
    found = [each for each in pytree.tree_leaves(optimizer) if each is not None]
    if not all(hasattr(each, "step") and not isinstance(each, type) for each in found):
        raise InputError(f"cgpass.explain: optimizer= takes an optimizer, got {optimizer!r}")


def _call(run: Callable[[], Any], training: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Make one call with its backward, unless it ran that itself, and drop gradients."""
    leaves = [each for each in tensors if each.is_leaf]
    with torch.set_grad_enabled(training):
        result = run()
        outputs = _differentiated(result) if training else []
    if not outputs or any(each.grad is not None for each in leaves):
        return
    ones = [torch.ones_like(output) for output in outputs]
    made = [each for each in tensors if not each.is_leaf and each.requires_grad]
    try:
        if made:  # nothing goes on in what made them
            inputs = made + _leaves_before(outputs, {each.grad_fn for each in made})
            torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        else:
            torch.autograd.backward(outputs, ones)
    except RuntimeError as error:
        if _GRAPH_IS_GONE not in str(error):
            raise
    for each in leaves:
        each.grad = None


def _leaves_before(outputs: Sequence[torch.Tensor], ends: set[Any]) -> list[torch.Tensor]:
    """List the leaves of a graph that are reached without passing some nodes."""
    found, seen = list[torch.Tensor](), {None, *ends}
    nodes: list[Any] = [each.grad_fn for each in outputs]
    for node in nodes:
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return found


def _differentiated(result: Any) -> list[torch.Tensor]:
    """Choose where a backward begins: at the loss of a model's output, else at whatever requires grad."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, each.name, None) for each in dataclasses.fields(result)]
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# ---- what a function reaches, and what is restored


def _reached(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield a value, what it names, holds or is bound to, and what these do: a loop's step names a helper, and that the model."""
    yield from value.modules() if isinstance(value, torch.nn.Module) else (value,)
    if isinstance(value, types.MethodType):  # an optimizer's step, compiled or not
        yield from _reached(value.__self__, 0)
    if not depth or isinstance(value, torch.nn.Module | torch.Tensor | types.ModuleType):
        return
    found = [*getattr(value, "__dict__", {}).values()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found += [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        found += value.__defaults__, value.__kwdefaults__, *(c.cell_contents for c in cells)
        codes = [value.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            loads = [each for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
            found += [value.__globals__.get(load.argval) for load in loads]
    elif isinstance(value, types.MethodType):
        found += value.__self__, value.__func__, *getattr(value.__self__, "__dict__", {}).values()
    elif isinstance(value, functools.partial):
        found += value.func, value.args, value.keywords
    for each in pytree.tree_leaves(found):
        yield from _reached(each, depth - 1)


def _put_back(stack: contextlib.ExitStack, tensors: Sequence[Any], values: Sequence[Any]) -> None:
    """Have a stack restore parameters, buffers, gradients and what optimizers and scalers keep.

    Values return to the very tensors that had them: guards and recordings of a compiled optimizer know these.
    """
    todo, seen, there = list[Any](), set[int](), [*tensors]
    last = stack.enter_context(contextlib.ExitStack())  # a gradient fits a restored parameter
    for each in values:
        if isinstance(each, torch.nn.Module):
            todo += each._parameters, each._buffers
        elif isinstance(each, torch.optim.Optimizer):
            todo += each.state, each.param_groups
        elif isinstance(each, torch.Generator):
            stack.callback(each.set_state, each.get_state())
        elif isinstance(each, torch.amp.GradScaler):
            stack.callback(each.load_state_dict, each.state_dict())
            stages = vars(each).get("_per_optimizer_states")  # which optimizers it has unscaled
            if stages is not None:  # it is enabled
                stack.callback(setattr, each, "_per_optimizer_states", stages)
                todo.append(stages)
    for each in todo:  # and what is added meanwhile
        if id(each) not in seen and not callable(each) and not isinstance(each, types.ModuleType):
            seen.add(id(each))
            todo += _kept(stack, each)
            there += [each] * isinstance(each, torch.Tensor)
    steps = any(
        isinstance(v, types.MethodType) and hasattr(v.__self__, "param_groups") for v in values
    )
    for each in (each for each in dict.fromkeys(there) if each.is_leaf or each.retains_grad):
        grad = each.grad
        last.callback(setattr, each, "grad", grad)
        each.grad = grad.clone() if steps and grad is not None else None


def _kept(stack: contextlib.ExitStack, value: Any) -> Iterable[Any]:
    """Have a stack restore a tensor or what holds some; returns what it holds."""
    if isinstance(value, torch.Tensor):
        if (before := _copy(value)) is not None:
            stack.callback(_write, value, before)
        return ()
    if isinstance(value, dict | list | collections.deque):
        fill = value.update if isinstance(value, dict) else value.extend
        stack.callback(fill, copy.copy(value))
        stack.callback(value.clear)  # first: a stack begins with the last
        return value.values() if isinstance(value, dict) else value
    # an object may be what is kept of a parameter
    return value if isinstance(value, tuple) else (getattr(value, "__dict__", None),)


def _copy(value: torch.Tensor) -> torch.Tensor | None:
    """In host memory, but for what only its own class can copy; None where nobody writes: lazy, meta and expanded ones."""
    is_strided = value.layout is torch.strided
    if (
        torch.nn.parameter.is_lazy(value)
        or value.is_meta
        or (is_strided and overlaps_itself(value))
    ):
        return None
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and is_strided
    return value.detach().to("cpu", copy=True) if is_plain else value.detach().clone()


def _write(value: torch.Tensor, before: torch.Tensor) -> None:
    """Restore a value; not where it is the same, for a backward that waits may have saved it."""
    if (value.shape, value.dtype) != (before.shape, before.dtype):
        value.data = before.to(value.device)
    is_plain = before.layout is torch.strided and type(before) is torch.Tensor
    if is_plain and torch.equal(bits(value.detach().to(before.device)), bits(before)):
        return
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        value.copy_(before)


def _spread(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Spread a batch that is given by itself: a mapping by name, a tuple or list by position."""
    batch: Any = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else args), kwargs


def _name_of(fn: Fn) -> str:
    fn = getattr(fn, "_orig_mod", fn)
    if isinstance(fn, torch.nn.Module):
        return f"{type(fn).__name__}.forward"
    return str(getattr(fn, "__name__", type(fn).__name__))
