"""Backward passes: autograd's tasks, saved tensors, checkpoints, and second derivatives."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import FunctionMeta
from torch.utils import checkpoint

from cgpass.torch_private.compiling import replaced

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread works for, negative outside of one. Numbers don't come back.

Source: torch/csrc/autograd/graph_task.h, 2.11 to 2.15.
"""
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True if the running backward pass leaves its graph for another one (`retain_graph=True`).

Source: torch/csrc/autograd/init.cpp, 2.11 to 2.15.
"""
outside_dynamo: Callable[..., Any] = torch._disable_dynamo
"""A function, never traced by Dynamo, nor what it calls."""


frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Return Dynamo's callback for frames that Python enters in this thread; None where it does nothing, and `outside_dynamo`,
which imports it, is not needed.

Source: torch/csrc/dynamo/eval_frame.c, 2.11 to 2.15.
"""


def after_backward(callback: Callable[[], None]) -> None:
    """Have the running backward pass call something when it is done; not if it fails.

    Source: torch/csrc/autograd/engine.h `queue_callback`, 2.11 to 2.15.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # pyrefly: ignore
    engine.queue_callback(callback)


def next_number() -> int:
    """Return the number that the next node of an autograd graph gets in this thread.

    Source: torch/csrc/autograd/init.cpp `_get_sequence_nr`, 2.11 to 2.15.
    """
    return torch._C._autograd._get_sequence_nr()  # pyrefly: ignore


def number_of(node: Any) -> int:
    """Return the number of a node; nodes that add to a leaf's gradient have one above all."""
    return node._sequence_nr()


def saved_on(node: Any) -> Iterator[Any]:
    """Return the tensors that a node of an autograd graph saved: a `torch._C._autograd.SavedTensor` each."""
    for name in _raw_saved(type(node)):
        value = getattr(node, name)
        yield from value if isinstance(value, tuple) else (value,)


def saved_tensor(saved: Any) -> torch.Tensor | None:
    """Return the tensor that was saved, and that autograd checks the version of; None if hooks packed it or it was freed.

    Source: torch/csrc/autograd/init.cpp, `SavedTensor.data`, 2.11 to 2.15: the very tensor, or what hooks made of it.
    """
    return saved.data if unpack_hook(saved) is None else None


def unpack_hook(saved: Any) -> Any:
    """Return the hook that gives a saved tensor back, if hooks have packed it."""
    return getattr(saved, "unpack_hook", None)


@contextlib.contextmanager
def no_outer_saved_tensors_hooks() -> Iterator[None]:
    """A block in which only those hooks of saved tensors are called that are set in it.

    Source: torch/csrc/autograd/python_saved_variable_hooks.cpp, `PyDefaultSavedVariableHooks`, 2.11 to 2.15: a stack
    for each thread.
    """
    autograd = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def check_versions(node: Any) -> None:
    """Raise as a backward would if something that a node saved was changed in place since.

    Source: torch/csrc/autograd/saved_variable.cpp `unpack`, which the attributes call, 2.11 to 2.15.
    """
    for name in _raw_saved(type(node)):
        plain = name.removeprefix("_raw")
        getattr(node, plain if hasattr(type(node), plain) else plain.removeprefix("_"))


@functools.cache
def _raw_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


@contextlib.contextmanager
def checkpoint_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """`saved_tensors_hooks` that torch's selective checkpoint policies know to be a checkpoint's, not the user's.

    Source: torch/utils/checkpoint.py `_current_user_saved_tensors_hooks`, 2.15; 2.11 does not look.
    """
    outer = getattr(checkpoint, "_current_user_saved_tensors_hooks", None)
    marked: Any = functools.partial(pack)
    marked._checkpoint_internal = True
    marked._user_hooks = None if outer is None else outer()
    try:
        with torch.autograd.graph.saved_tensors_hooks(marked, unpack):
            yield
    finally:
        # the graph keeps `marked`, and must not keep the user's hooks through it
        del marked._user_hooks


@contextlib.contextmanager
def double_backwards_raise(error: Callable[[], Exception]) -> Iterator[None]:
    """Make functions that AOTAutograd compiles inside raise our error if their gradients are differentiated again.

    AOTAutograd makes an autograd function for each graph, whose gradients under `create_graph=True` end in a node that
    raises, if they depend on saved tensors that require grad. Autograd leaves such nodes out where they lead to nothing
    that is wanted; ours leads to all leaves that the gradients depend on.

    Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction`; _dynamo/decorators.py `skip`, 2.11 to
    2.15.
    """
    init: Any = FunctionMeta.__init__

    def noting(cls: Any, name: str, bases: Any, attrs: Any) -> None:
        init(cls, name, bases, attrs)
        if name == "CompiledFunction" and cls.__module__.startswith("torch._functorch."):
            cls.backward = staticmethod(_once_differentiable(cls.backward, error))

    with replaced(FunctionMeta, "__init__", noting):
        yield


def _once_differentiable(
    backward: Callable[..., Any], error: Callable[[], Exception]
) -> Callable[..., Any]:
    from torch._dynamo.decorators import skip

    def once(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        given = (
            grads[0] if isinstance(grads[0], list) else grads
        )  # 2.14 gives one list, to be emptied
        sources = [*_leaves(ctx), *given]
        return _only_once(error, tuple(backward(ctx, *grads)), *sources)

    skip(once)  # where a compiled function calls the backward, Dynamo looks at each frame in it
    return once


def _leaves(node: Any) -> list[torch.Tensor]:
    """Leaves that a node of an autograd graph leads to."""
    seen, due, found = set(), [node], []
    while due:
        if (at := due.pop()) is None or at in seen:
            continue
        seen.add(at)
        due += [each for each, _ in at.next_functions]
        if hasattr(at, "variable"):
            found.append(at.variable)
    return found


class _OnlyOnce(torch.autograd.Function):
    """Gradients under `create_graph=True`: theirs raise. They depend on the tensors behind them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]
        ctx.error, found, *_ = args
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise ctx.error()


@outside_dynamo
def _only_once(*args: Any) -> Any:
    return _OnlyOnce.apply(*args)
