"""`explain`: reports on the calls of a block, or on calls that it makes itself."""

import contextlib
import copy
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, overload

import torch
from torch.utils import _pytree as pytree

from cgpass import telemetry, torch_private
from cgpass.backend import cgpass
from cgpass.errors import InputError, OptionError
from cgpass.options import set_defaults
from cgpass.report import watch
from cgpass.report.report import Report
from cgpass.runtime.inputs import overlaps_itself
from cgpass.runtime.writes import bits
from cgpass.whole_step import TrainStep

Fn = Callable[..., Any] | torch.nn.Module

_CALLS: Final = 9


@overload
def explain() -> contextlib.AbstractContextManager[Report]: ...
@overload
def explain(fn: Fn, /, *args: Any, **kwargs: Any) -> Report: ...
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

    With a function, nine calls run, with their backward, compiled with `backend="cgpass"` unless it or something that it
    names is compiled already. A single batch is passed as data loaders mean it: a mapping as `**batch`, a tuple or list as
    `*batch`; `[batch]` passes it whole. Afterwards modules and optimizers that the function is, receives or names itself
    are restored, with gradients and torch's random numbers. Nothing else is: what other objects hold, scalers, caches,
    written arguments. If this compiled the function, recordings of the same code are freed, also those of your own calls.
    Calls begin without gradients. Watch code that reads gradients or trains with a block.

    Args:
        fn: A module or function, compiled or not; leave it out for a block.
        args: The arguments of one call.
        training: True to run a backward, too: of the result's loss if it has one, else of all results that require grad
            (in tuples, lists, dicts and dataclasses), unless the function ran it itself. False to run calls under
            `torch.no_grad()`.
        compare: True to time calls with CUDA graphs and without, afterwards.
        optimizer: One or several that are restored, too.
        options: Fields of `cgpass.Options`, for a function that is not compiled yet.
        kwargs: The keyword arguments of one call.

    Returns:
        A report; `print` shows it, `save` makes a page of it. For a block, a context manager that gives one.

    Raises:
        OptionError: `options=` for a function that is compiled already.
        InputError: No function, and arguments; or a function that is a training step.
        Exception: Whatever the function raises, as it is.
    """
    if fn is None:
        if args or kwargs or options or compare or optimizer is not None or not training:
            raise InputError("cgpass.explain: arguments need a function first, got None")
        return watch.watched()
    _check(fn, optimizer)
    args, kwargs = _spread(args, kwargs)
    inner = inspect.unwrap(fn, stop=inspect.ismethod)
    used = [*_used(fn), *pytree.tree_leaves((args, kwargs, optimizer))]
    bound = getattr(inner, "__self__", None)
    if isinstance(bound, torch.optim.Optimizer) or any(isinstance(u, TrainStep) for u in used):
        raise InputError(
            "cgpass.explain: this function trains. Watch steps of your own: with cgpass.explain() as report: ..."
        )
    modules = [m for each in used if isinstance(each, torch.nn.Module) for m in each.modules()]
    kinds = torch.nn.Module | types.FunctionType
    is_compiled = any(
        torch_private.is_compiled(each) for each in (*used, *modules) if isinstance(each, kinds)
    )
    if options and is_compiled:
        raise OptionError(
            "cgpass.explain: a compiled function has its options already; pass them to torch.compile instead"
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    run = fn
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_defaults(**options or {}))
        stack.enter_context(torch.random.fork_rng([*devices]))
        tensors = _restored(stack, used, modules)
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
        if compare and report.device != watch.SIMULATED and report.counters["replays"]:
            report.ms, report.plain_ms = watch.compared(call)
        return report


def _check(fn: Any, optimizer: Any) -> None:
    if not callable(fn) or isinstance(fn, type):
        raise InputError(f"cgpass.explain takes a module or function, got a {type(fn).__name__}")
    found = [each for each in pytree.tree_leaves(optimizer) if each is not None]
    if not all(isinstance(each, torch.optim.Optimizer) for each in found):
        raise InputError(f"cgpass.explain: optimizer= takes an optimizer, got {optimizer!r}")


def _call(run: Callable[[], Any], training: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Make one call with its backward, unless it ran that itself, and leave no gradients."""
    with torch.set_grad_enabled(training):
        result = run()
        ends = _differentiated(result) if training else []
    del result  # or a replay of the backward would have to move it
    known = [each for each in tensors if each.is_leaf]  # by now some may have a history
    if ends and all(each.grad is None for each in known):
        _backward(ends, [each for each in tensors if not each.is_leaf and each.requires_grad])
    for each in known:
        each.grad = None


def _backward(ends: Sequence[tuple[Any, torch.Tensor]], made: list[torch.Tensor]) -> None:
    """Run a backward that ends at arguments that something made, and adds to nobody's gradients."""
    edges, ones = zip(*ends, strict=True)
    leaves = _leaves_before(edges, {each.grad_fn for each in made})
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        if made:
            torch.autograd.grad(edges, made + leaves, ones, allow_unused=True)
        else:
            torch.autograd.backward(edges, ones)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):  # the function ran it
            raise
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad


def _leaves_before(edges: Sequence[Any], ends: set[Any]) -> list[torch.Tensor]:
    """List the leaves of a graph that are reached without passing some nodes."""
    found, seen = list[torch.Tensor](), {None, *ends}
    nodes: list[Any] = [each.node for each in edges]
    for node in nodes:
        if node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return found


def _differentiated(result: Any) -> list[tuple[Any, torch.Tensor]]:
    """Choose where a backward begins: at the loss of a model's output, else at whatever requires grad; with ones for each."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        result = loss
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, each.name, None) for each in dataclasses.fields(result)]
    found = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    edge = torch.autograd.graph.get_gradient_edge
    return [(edge(each), torch.ones_like(each)) for each in found if each.requires_grad]


# ---- what is restored


def _used(fn: Any) -> list[Any]:
    """List a function, what it is bound to or given ahead, and what it names itself; so of each function that it wraps."""
    found, chain = list[Any](), [fn]
    for each in chain:
        found.append(each)
        if isinstance(each, functools.partial):
            found += each.args, each.keywords
            chain.append(each.func)
        elif isinstance(each, types.MethodType):
            found += each.__self__, *getattr(each.__self__, "__dict__", {}).values()
            chain.append(each.__func__)
        elif isinstance(each, types.FunctionType):
            cells = [cell for cell in each.__closure__ or () if cell != types.CellType()]
            found += [cell.cell_contents for cell in cells]
            found += each.__defaults__, each.__kwdefaults__
            found += [each.__globals__.get(name) for name in _globals_of(each.__code__)]
            chain += [each.__wrapped__] if hasattr(each, "__wrapped__") else []
        elif not isinstance(each, torch.nn.Module):
            found += getattr(each, "__dict__", {}).values()
            call = type(each).__call__
            chain += [call] if isinstance(call, types.FunctionType) else []
    return pytree.tree_leaves(found)


def _globals_of(code: types.CodeType) -> list[str]:
    """Names of the globals that a function's code reads, and that of functions and comprehensions in it."""
    loads = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return loads + [name for each in inner for name in _globals_of(each)]


def _restored(
    stack: contextlib.ExitStack, used: Sequence[Any], modules: Sequence[torch.nn.Module]
) -> list[torch.Tensor]:
    """Have a stack restore modules, optimizers and gradients; returns tensors that have gradients in a call.

    Values return to the very tensors that had them: guards and recordings of a compiled optimizer know these.
    """
    tensors = [each for each in used if isinstance(each, torch.Tensor)]
    tensors += [t for m in modules for t in (*m.parameters(False), *m.buffers(False))]
    last = stack.enter_context(contextlib.ExitStack())  # a gradient fits a restored parameter
    for module in dict.fromkeys(modules):
        _keep(stack, module._parameters)
        _keep(stack, module._buffers)
    optimizers = [each for each in used if isinstance(each, torch.optim.Optimizer)]
    for optimizer in dict.fromkeys(optimizers):
        _keep(stack, optimizer.state)
        _keep(stack, optimizer.param_groups)
        tensors += [each for group in optimizer.param_groups for each in group["params"]]
    for each in dict.fromkeys(tensors):
        last.callback(_require_grad, each, each.requires_grad)
        if each.is_leaf or each.retains_grad:
            last.callback(setattr, each, "grad", each.grad)
            each.grad = None
    return tensors


def _require_grad(tensor: torch.Tensor, before: bool) -> None:
    if tensor.is_leaf and tensor.requires_grad != before:
        tensor.requires_grad_(before)


def _keep(stack: contextlib.ExitStack, value: Any) -> None:
    """Have a stack restore a tensor, or a dict or list and the tensors in it."""
    if isinstance(value, torch.Tensor):
        if (before := _copy(value)) is not None:
            stack.callback(_write, value, before, value.data)
    elif isinstance(value, dict | list):
        fill = value.update if isinstance(value, dict) else value.extend
        stack.callback(fill, copy.copy(value))
        stack.callback(value.clear)  # first: a stack begins with the last
        for each in value.values() if isinstance(value, dict) else value:
            _keep(stack, each)


def _copy(value: torch.Tensor) -> torch.Tensor | None:
    """In host memory, but for what only its own class can copy; None where nobody writes: lazy, meta and expanded ones."""
    is_strided = value.layout is torch.strided
    is_lazy = torch.nn.parameter.is_lazy(value) or value.is_meta
    if is_lazy or (is_strided and overlaps_itself(value)):
        return None
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and is_strided
    return value.detach().to("cpu", copy=True) if is_plain else value.detach().clone()


def _write(value: torch.Tensor, before: torch.Tensor, place: torch.Tensor) -> None:
    """Restore a value where it lay; not where it is the same, for a backward that waits may have saved it."""
    is_strided = before.layout is torch.strided and not before.is_quantized
    is_plain = is_strided and type(before) is torch.Tensor
    is_other = (value.shape, value.dtype) != (before.shape, before.dtype)
    if is_other or (is_plain and not value.is_set_to(place)):
        value.data = place
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
