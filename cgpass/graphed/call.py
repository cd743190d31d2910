"""`Call`: one call of a recorded pass, from its forward to its backward.

Note [Gradients of gradients]
    Autograd leaves out nodes that lead to nothing that is wanted, an error among them. Gradients depend on the
    gradients that came in and on what the forward read. So what gradients end in under `create_graph=True` leads there,
    too. The compiled node sees to that (see Note [A node of our own]); elsewhere `_NoSecond` does, which is led to the
    forward's node by an empty result that the forward saves for this only: its inputs would be held, and hold memory.

Note [What a result holds]
    A result holds its node, and the node this call. Python's garbage collector does not see into the compiled node. So
    a result that is kept where the recording leads to, as an attribute of the module that was called, would keep the
    module, its graphs and itself for ever. Once the backward is done the call therefore holds neither.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.errors import GraphedBackwardError
from cgpass.runtime import fast

if TYPE_CHECKING:
    from cgpass.graphed.pending import Aside
    from cgpass.graphed.recorded import RecordedPass
    from cgpass.graphed.versions import Versions


class Call:
    """One forward of a recorded pass, until its backward."""

    __slots__ = (
        "__weakref__",
        "_aside",
        "_done",
        "_nothing",
        "_position",
        "_recorded",
        "_versions",
        "first",
        "last",
        "name",
        "statics",
    )

    def __init__(self, recorded: "RecordedPass", statics: list[torch.Tensor]) -> None:
        """Args: recorded: what is called. statics: what it reads where it lies."""
        backward = recorded.backward
        assert backward is not None
        self._recorded: RecordedPass | None = recorded
        """Until the backward is done. See Note [What a result holds]."""
        self.name = recorded.name
        self._nothing = recorded.no_gradients
        self.first = recorded.forward.birth
        last = recorded.weight_grads or backward
        self.last = math.inf if recorded.keeps_saved else last.birth
        self.statics = statics
        """Held until the backward is done, as autograd would: the modules may have others by then."""
        self._position: Any = None
        self._aside: Aside | None = None
        self._versions: Versions | None = None
        self._done = False

    @property
    def recorded(self) -> "RecordedPass":
        """What is called; to be asked for while its backward may come."""
        assert self._recorded is not None
        return self._recorded

    def run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the forward; to be called where gradients are recorded.

        Args:
            tensors: The arguments.

        Returns:
            The results; the backward is due to those that have a gradient, if anything requires one.
        """
        recorded = self.recorded
        wanted = [torch_private.unwrap_if_dead(tensors[i]) for i in recorded.wanted_inputs]
        wanted += map(self.statics.__getitem__, recorded.wanted_statics)
        if recorded.gives_arguments or torch_private.uses_compiled_autograd():
            outputs: Any = _apply(self, tensors, *wanted)
            return outputs[:-1]
        requires_grad = 1 in fast.requiring_grad(wanted)
        torch_private.set_grad_enabled(False)
        try:
            made = self._forward(tensors, requires_grad=requires_grad)
        finally:
            torch_private.set_grad_enabled(True)
        if requires_grad:
            saved = [made[i] for i in recorded.outputs_read]
            where = recorded.edges, made, recorded.outputs_with_grad
            once = not recorded.retains
            lists = saved, (), "GraphedBackward"
            fast.attach(_run_backward, self, wanted, *where, *lists, False, once)
        return made

    def _forward(self, tensors: list[torch.Tensor], *, requires_grad: bool) -> list[torch.Tensor]:
        recorded = self.recorded
        with recorded.group.owner.lock:
            if recorded.recomputes:
                self._position = recorded.states.position()
            outputs = recorded.run_forward(tensors, self.statics)
            if requires_grad:
                recorded.pending.add(self)
                self._versions = recorded.read.versions(self.statics)
        return outputs

    def put_aside(self) -> None:
        """Copy away what the backward needs."""
        if self._versions is not None:
            self._versions.leave_samples()
        self._aside = self.recorded.put_aside(self)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """Run the backward.

        Args:
            grads: Of the outputs that have one; None for what nothing gave.

        Returns:
            Those of the inputs and parameters that get one; None for all where no gradient was given.

        Raises:
            GraphedBackwardError: It ran before, its graphs were freed, or what it reads was changed in place.
        """
        recorded = self._recorded
        if all(grad is None for grad in grads):
            self.settle()
            return self._nothing
        if recorded is None:
            raise self._came_before()
        with recorded.group.owner.lock:
            if self._done and not recorded.retains:  # in another thread, say, while this one waited
                raise self._came_before()
            if recorded.closed:
                raise GraphedBackwardError(
                    f"{recorded.name}: its graphs were freed between this forward and its backward. Call reset() or "
                    "close() when no backward is due."
                )
            statics = recorded.check_statics(self)
            if self._versions is not None:
                self._versions.check()
            recorded.group.driver.enter_call()
            self.bring_back()
            outputs = recorded.run_backward(grads, statics, self._position)
            self._done = True
            if recorded.weight_grads is not None and recorded.backward is not None:
                recorded.due_weight_grads.append(self)
                self.recorded.pending.remove(self)
                self.first = recorded.backward.birth  # which made what is needed now, too
                self.recorded.pending.add(self)
            else:
                self.settle()
            return outputs

    def _came_before(self) -> GraphedBackwardError:
        return GraphedBackwardError(
            f"{self.name}: a second backward through one forward; what it needs died in the first. Record with "
            "GraphedOptions(retain_graph_in_backward=True)."
        )

    def bring_back(self) -> None:
        """Put back what was copied away."""
        aside, self._aside = self._aside, None
        if aside is not None:
            self.recorded.take_back(aside)
            if self._versions is not None:
                self._versions.take_samples()
            self.recorded.pending.add(self)

    def settle(self) -> None:
        """Note that nothing more of this call is to come, unless its backward may run again."""
        recorded = self._recorded
        if recorded is None or recorded.retains:
            return
        self._versions = None
        recorded.pending.remove(self)
        if self._done:
            self.statics = []
            self._recorded = None

    def is_due_to(self, recorded: "RecordedPass") -> bool:
        """Whether a backward of a recording may still come."""
        return self._recorded is recorded and (recorded.retains or not self._done)


@torch_private.outside_dynamo
def _run_backward(
    call: Call, saved: list[torch.Tensor] | None, grads: list[torch.Tensor | None] | None
) -> list[Any]:
    """See `fast.attach`. A backward may be called in what Dynamo runs, and would be traced."""
    if saved is None or grads is None:
        raise _no_second(call.name)
    if not torch.is_grad_enabled():
        return call.backward(grads)
    with torch.no_grad():  # create_graph=True
        return call.backward(grads)


def _no_second(name: str) -> GraphedBackwardError:
    return GraphedBackwardError(
        f"{name}: gradients of its gradients were asked for, and none are recorded. Call the original where it is "
        "differentiated twice."
    )


class _Graphed(torch.autograd.Function):
    """Forward and backward as one node, where the compiled one can't be used."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, tensors: list[torch.Tensor], *wanted: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the results, and an empty tensor: see Note [Gradients of gradients]."""
        del wanted  # read where they lie
        ctx.call, recorded = call, call.recorded
        ctx.with_grad, ctx.reads = recorded.outputs_with_grad, bool(recorded.outputs_read)
        ctx.set_materialize_grads(False)
        outputs = call._forward(tensors, requires_grad=True in ctx.needs_input_grad)
        if recorded.without_grad:
            ctx.mark_non_differentiable(*[outputs[i] for i in recorded.without_grad])
        link = torch.empty(0)
        ctx.save_for_backward(*[outputs[i] for i in recorded.outputs_read], link)
        return (*outputs, link)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        call: Call = ctx.call
        given = [grad_outputs[i] for i in ctx.with_grad]
        if ctx.reads:
            _ = ctx.saved_tensors  # autograd checks here that nobody changed them
        if not torch.is_grad_enabled():
            return (None, None, *_run_backward(call, [], given))
        link = ctx.saved_tensors[-1]
        grads = _run_backward(call, [], given)
        made = [grad for grad in grads if grad is not None]
        fenced = iter(_NoSecond.apply(call.name, len(made), *made, link, *grad_outputs))
        return (None, None, *(grad if grad is None else next(fenced) for grad in grads))


_apply = torch_private.direct_apply(_Graphed)


class _NoSecond(torch.autograd.Function):
    """For `create_graph=True`: the gradients' own gradients are an error. See Note [Gradients of gradients]."""

    @staticmethod
    def forward(ctx: Any, name: str, num_grads: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(grad.detach() for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        del grad_outputs
        raise _no_second(ctx.name)
