"""`TrainingCall`: calls a compiled training function without AOTAutograd's wrappers, where those only loop.

Note [What AOTAutograd's autograd function does]
    It runs the forward graph, saves what the backward reads, and has autograd call the backward graph; all of it in
    Python and once per parameter. Where nothing else is to be done (see `torch_private.training_layout`), a compiled node does
    that: see Note [A node of our own]. Until it is there, until the backward is compiled (AOTAutograd does that late
    where sizes are symbols), and wherever autograd does not run as by default, calls go AOTAutograd's way. Both ways
    save the same tensors in the same order, so that a checkpoint around a call may take the other one when it recomputes.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from cgpass import torch_private
from cgpass.compile.layouts import Boxed
from cgpass.errors import DoubleBackwardError
from cgpass.runtime import fast


class _Here(threading.local):
    step: Any = None
    """The training step that this thread is in, if it is in one: see `whole_step.py`. Its `call(training, args, run)` runs
    what a forward is the beginning of, or with `run` the forward alone; `note_graph(why)` notes a graph that no step can
    have as a whole."""


here = _Here()


_TWICE_WITHOUT_DETERMINISM = (
    "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was previously "
    "generated during the forward function while torch.use_deterministic_algorithms(False) was set."
)

_WRAPPED = "a result is an input, another result, a view or a detach() of one, or a tensor is of a subclass; return copies (clone()), and write attributes in place (add_, copy_)"


_Graphs = tuple[torch_private.TrainingLayout, Boxed, Boxed, tuple[int, ...]]
"""Layout, forward, backward, and the inputs that get gradients, once both graphs are there."""


class TrainingCall:
    """A forward and a backward graph, called in turns by autograd."""

    def __init__(self) -> None:
        self._forward: Boxed | None = None
        self._layout: torch_private.TrainingLayout | None = None
        self._num_forwards = 0
        self.graphs: _Graphs | None = None
        self._detached: tuple[int, ...] = ()
        """Inputs that require grad and get none: what is saved of them must not hold their history."""

    def forget(self) -> None:
        """Nothing is compiled after all."""
        self._forward = self._layout = self.graphs = None
        self._num_forwards = 0

    def note_forward(self, fn: Boxed) -> None:
        """Note the forward graph, which AOTAutograd compiles now."""
        self._num_forwards += 1
        self._forward = fn
        self._layout = torch_private.training_layout()

    def note_backward(self, fn: Boxed, outputs: Sequence[Any]) -> None:
        """Note the backward graph, whose `outputs` are nodes, or None for inputs that get no gradient."""
        if self._layout is None or self._forward is None:
            return
        given = {n for n, output in enumerate(outputs) if isinstance(output, fx.Node)}
        wanted = tuple(n for n in self._layout.requiring_grad if n in given)
        self._detached = tuple(n for n in self._layout.requiring_grad if n not in given)
        self.graphs = self._layout, self._forward, fn, wanted

    def around(self, compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
        """Return the callable that replaces AOTAutograd's wrapper of Dynamo's graph."""
        if self._num_forwards != 1 or self._layout is None or torch_private.handles_subclasses(gm):
            return _noted(compiled) if self._num_forwards else compiled

        def run(args: tuple[Any, ...]) -> Any:
            return self.call(args) if self.is_plain(args) else compiled(*args)

        def call(*args: Any) -> Any:
            step = here.step
            return run(args) if step is None else step.call(self, args, run)

        return call

    def is_plain(self, args: Sequence[Any]) -> bool:
        """Tell if both graphs are there, and autograd does in this call what it does by default."""
        return (
            fast.is_loaded
            and self.graphs is not None
            and len(args) == self.graphs[0].num_inputs
            and not fast.in_transform()
            and torch_private.autograd_is_plain()
        )

    def call(self, args: tuple[Any, ...]) -> list[Any]:
        """Run the forward, and have autograd know of its backward."""
        assert self.graphs is not None
        layout, forward, _, wanted = self.graphs
        try:
            outputs = _run(forward, self.begin(args))
        except BaseException:
            torch_private.set_grad_enabled(True)  # a signal may come before `torch.no_grad` did it
            raise
        returned = list(outputs[: layout.num_returned])
        fast.attach(
            _run_backward,
            (self, list(outputs[layout.rest])),
            args,
            wanted,
            returned,
            layout.differentiable,
            outputs[layout.checked],
            outputs[layout.unchecked],
            "CompiledFunctionBackward",
        )
        for n, dimensions in layout.dynamic:
            torch_private.mark_dynamic(returned[n], dimensions)
        return returned

    def begin(self, args: Sequence[Any]) -> list[Any]:
        """Inputs of the forward graph, for those of a call, which counts as having written what the graph writes."""
        assert self.graphs is not None
        if written := self.graphs[0].written:
            torch.autograd.graph.increment_version([args[i] for i in written])
        inputs = list(args)
        for i in self._detached:
            inputs[i] = inputs[i].detach()
        return inputs

    def run_backward(self, rest: list[Any], saved: list[Any], grads: list[Any]) -> Sequence[Any]:
        """Gradients of the inputs, for what a forward saved; the lists are emptied. See `fast.attach`."""
        assert self.graphs is not None
        layout, _, backward, _ = self.graphs
        if layout.deterministic is False and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(_TWICE_WITHOUT_DETERMINISM)
        tangents = [fit(grad) for fit, grad in zip(layout.tangents, grads, strict=True)]
        args = [*rest, *saved, *tangents]
        saved.clear()
        grads.clear()
        del tangents
        return _run(backward, args)


def _noted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that a step which comes upon it can't have as a whole."""

    def call(*args: Any) -> Any:
        if here.step is not None:
            here.step.note_graph(_WRAPPED)
        return compiled(*args)

    return call


def _run(fn: Boxed, args: list[Any]) -> Sequence[Any]:
    """Call a graph as AOTAutograd does: autograd sees nothing of it, autocast was traced into it."""
    with torch.no_grad(), torch_private.autocast_off():
        return fn(args)


@torch_private.outside_dynamo
def _run_backward(
    rest: tuple[TrainingCall, list[Any]], saved: list[Any] | None, grads: list[Any] | None
) -> Sequence[Any]:
    """See `fast.attach`. A backward may be called in what Dynamo runs, and would be traced."""
    if saved is None or grads is None:
        raise DoubleBackwardError
    call, numbers = rest
    return call.run_backward(numbers, saved, grads)
