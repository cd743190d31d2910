"""`RecordedPass`: forward and backward of one callable as graphs, and one call of them."""

import logging
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass import _torch
from cgpass.errors import GraphedBackwardError, StaticInputMovedError
from cgpass.graphed.arguments import Arguments
from cgpass.graphed.group import Group
from cgpass.graphed.pending import Aside
from cgpass.graphed.statics import MemberGoneError, Statics
from cgpass.graphed.values import InputMemory, OutputStructure, give_up_samples
from cgpass.graphed.versions import ReadByBackward, Versions
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.placeholders import Placeholder
from cgpass.runtime.recording import Recording
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RecordedPass:
    """One recording of a callable's forward, and of its backward if it has one."""

    name: str
    group: Group
    statics: Statics
    stats: CallStats
    states: CheckpointStates
    arguments: Arguments
    written_statics: list[int]
    checks_statics: bool
    retains: bool
    forward: Recording
    forward_key: bytes
    structure: OutputStructure
    read: ReadByBackward
    footprint: list[torch.Tensor]
    """Memory that outlived the forward's capture, and the inputs'."""
    held: list[Any] = field(default_factory=list)
    """The captured autograd graph, if the backward leaves it alone."""
    backward: Recording | None = None
    backward_key: bytes = b""
    wanted_inputs: list[int] = field(default_factory=list)
    """Arguments that get a gradient."""
    wanted_statics: list[int] = field(default_factory=list)
    """Parameters that get one."""
    outputs_with_grad: list[int] = field(default_factory=list)
    outputs_read: list[int] = field(default_factory=list)
    """Outputs whose memory the backward reads."""
    grads: list[Placeholder] = field(default_factory=list)
    weight_grads: Recording | None = None
    """The graph of `backward_dw`."""
    weight_grads_for: list[int] = field(default_factory=list)
    """Parameters that it makes gradients for."""
    due_weight_grads: "deque[Call]" = field(default_factory=deque)
    """Of all recordings of the callable: calls whose backward ran, but not yet what was split off, oldest first."""
    last_used: int = 0
    closed: bool = False
    _warned: bool = False

    def __post_init__(self) -> None:
        self.pending = self.group.pending(self.forward.slot)
        self.recomputes = self.states.recorded is not None
        """Whether a backward has to know where random numbers of its forward began."""
        self.no_gradients = [None] * (len(self.wanted_inputs) + len(self.wanted_statics))
        self._aside: list[weakref.ref[Call]] = []
        self._writes = self.arguments.are_written or bool(self.written_statics)
        self._grad_memory = [InputMemory(grad.tensor, grad) for grad in self.grads]
        self._without_grad = [
            i for i in range(len(self.structure.tensors)) if i not in self.outputs_with_grad
        ]
        read = [n for n, i in enumerate(self.outputs_read) if i in self.outputs_with_grad]
        self.link = read[0] if read else -1
        """Among what a call saves: a result with a gradient. See Note [Gradients of gradients]."""

    # ---- forward

    def call(self, tensors: list[torch.Tensor], statics: list[torch.Tensor]) -> Any:
        """Run the forward, with a backward to come if anything requires grad."""
        if self.backward is None or not torch.is_grad_enabled():
            with self.group.owner.lock:
                return self.structure.build(self.run_forward(tensors, statics))
        wanted = [_torch.unwrap_if_dead(tensors[i]) for i in self.wanted_inputs]
        wanted += map(statics.__getitem__, self.wanted_statics)
        outputs: Any = _apply(Call(self, tensors, statics), *wanted)
        return self.structure.build(outputs if self.link >= 0 else outputs[:-1])

    def run_forward(
        self, tensors: list[torch.Tensor], statics: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Copy in what is not there, and replay; to be called with the owner's lock."""
        group, recording, stats = self.group, self.forward, self.stats
        group.driver.enter_call()
        group.prepare(recording, self.pending)
        stats.copied_bytes += self.arguments.copy_in(tensors)
        outputs = recording.run([*tensors, *statics])
        stats.replays += 1
        if self._writes:
            self.arguments.write_back(tensors)
            for i in self.written_statics:
                torch.autograd.graph.increment_version(statics[i])
        return group.hand_out(recording, outputs)

    # ---- backward

    def check_statics(self, call: "Call") -> list[torch.Tensor]:
        """Parameters and buffers as they are, or as they were in the forward if the modules have others now.

        Raises:
            StaticInputMovedError: They don't lie where the backward reads them.
        """
        if not self.checks_statics:
            return self.statics.now()
        try:
            statics = self.statics.now()
            key = self.statics.key_of(statics)
        except MemberGoneError:
            statics, key = call.statics, b""
        if key != self.backward_key:
            before = call.statics  # as after a `torch.func.functional_call`
            if self.statics.key_of(before) == self.backward_key:
                return before
            moved = self.statics.moved(self.backward_key, key or self.statics.key_of(before))
            if key == self.statics.key_of(before):
                raise StaticInputMovedError(
                    f"{self.name}: when the backward was recorded, hooks had put parameters or buffers elsewhere than "
                    f"in its forward, and in this call they stay where they were: {moved}. Do what the hooks did "
                    "between forward and backward in each call, or record without them."
                )
            raise StaticInputMovedError(
                f"{self.name}: parameters or buffers lie elsewhere in the backward than when it was recorded: "
                f"{moved}. Have them where the "
                "forward of this call had them, until its backward is done."
            )
        return statics

    def put_aside(self, call: "Call") -> Aside:
        """Copy away what a pending call needs."""
        self._aside = [ref for ref in self._aside if ref() is not None]
        self._aside.append(weakref.ref(call))
        aside = Aside(self.footprint)
        self.stats.rescues += 1
        self.stats.rescued_bytes += aside.num_bytes
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: calls come in another order than they were recorded in, so %d bytes that its backward needs are "
                "copied away and back in such calls. Give the order as GraphedOptions(order=...), one sample per "
                "microbatch, or run the backwards in the reverse order of the forwards.",
                self.name,
                aside.num_bytes,
            )
        return aside

    def take_back(self, aside: Aside) -> None:
        """Put back what was copied away."""
        self.group.prepare(self.forward, self.pending)
        aside.put_back()

    def run_backward(
        self, grads: Sequence[torch.Tensor | None], statics: list[torch.Tensor], position: Any
    ) -> list[Any]:
        """Copy gradients of the outputs in, and replay."""
        group, recording = self.group, self.backward
        assert recording is not None
        group.prepare(recording, self.pending)
        given: list[torch.Tensor] = []
        for place, memory in zip(self.outputs_with_grad, self._grad_memory, strict=True):
            grad = grads[place]
            if grad is None:
                grad = torch.zeros_like(memory.tensor)
            given.append(grad)
            try:
                self.stats.copied_bytes += memory.fill(grad)
            except RuntimeError:
                self._refuse_batched()
                raise
        if self.recomputes:
            self.states.rewind(position)
        outputs = recording.run([*given, *statics])
        self.stats.replays += 1
        return group.hand_out(recording, outputs, own=group.own_grads)

    def _refuse_batched(self) -> None:
        if _torch.in_vmap_or_functorch():
            raise GraphedBackwardError(
                f"{self.name}: a backward of batched gradients (is_grads_batched=True, jacobian(vectorize=True), or a "
                "backward inside of torch.vmap), and the graph has one gradient of each result. Run one backward after "
                "another, with GraphedOptions(retain_graph_in_backward=True), or call the original there."
            ) from None

    def run_weight_grads(self, call: "Call") -> None:
        """Make the weights' gradients of a backward that lacks them, and add them to their `.grad`."""
        group, recording = self.group, self.weight_grads
        assert recording is not None
        with group.owner.lock, torch.no_grad():
            statics = self.check_statics(call)
            group.driver.enter_call()
            self.due_weight_grads.remove(call)
            call.bring_back()
            group.prepare(recording, self.pending)
            outputs = group.hand_out(recording, recording.run(statics), own=group.own_grads)
            self.stats.replays += 1
            call.settle()
            for i, grad in zip(self.weight_grads_for, outputs, strict=True):
                parameter = statics[i]
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def is_pending(self) -> bool:
        """Whether a backward may still come."""
        calls = [*self.pending.alive(), *[ref() for ref in self._aside]]
        return any(isinstance(call, Call) and call.is_due_to(self) for call in calls)

    def close(self) -> None:
        """Free the graphs; what is held stays its holders'."""
        if self.closed:
            return
        self.closed = True
        self.held.clear()
        give_up_samples(self.arguments.memory)
        for call in [call for call in self.due_weight_grads if call.recorded is self]:
            self.due_weight_grads.remove(call)
        for recording in (self.forward, self.backward, self.weight_grads):
            if recording is not None:
                self.group.owner.close_recording(recording)


class Call:
    """One forward of a recorded pass, until its backward."""

    __slots__ = (
        "__weakref__",
        "_aside",
        "_done",
        "_position",
        "_tensors",
        "_versions",
        "first",
        "last",
        "recorded",
        "statics",
    )

    def __init__(
        self, recorded: RecordedPass, tensors: list[torch.Tensor], statics: list[torch.Tensor]
    ) -> None:
        """Args: recorded: what is called. tensors, statics: what it reads; the first are held during the forward only."""
        backward = recorded.backward
        assert backward is not None
        self.recorded = recorded
        self.first = recorded.forward.birth
        last = recorded.weight_grads or backward
        self.last = math.inf if recorded.retains else last.birth
        self._tensors: list[torch.Tensor] | None = tensors
        self.statics = statics
        """Held until the backward is done, as autograd would: the modules may have others by then."""
        self._position: Any = None
        self._aside: Aside | None = None
        self._versions: Versions | None = None
        self._done = False

    def forward(self, ctx: Any) -> tuple[torch.Tensor, ...]:
        """Run it."""
        recorded = self.recorded
        (tensors, statics), self._tensors = (self._tensors, self.statics), None
        assert tensors is not None
        with recorded.group.owner.lock:
            if recorded.recomputes:
                self._position = recorded.states.position()
            outputs = recorded.run_forward(tensors, statics)
            if True in ctx.needs_input_grad:
                recorded.pending.add(self)
                self._versions = recorded.read.versions(statics)
        if recorded._without_grad:
            ctx.mark_non_differentiable(*[outputs[i] for i in recorded._without_grad])
        saved = [outputs[i] for i in recorded.outputs_read]
        if recorded.link < 0:
            link = torch.empty(0)
            outputs.append(link)
            saved.append(link)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    def put_aside(self) -> None:
        """Copy away what the backward needs."""
        if self._versions is not None:
            self._versions.leave_samples()
        self._aside = self.recorded.put_aside(self)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """Run the backward.

        Raises:
            GraphedBackwardError: It ran before, its graphs were freed, or what it reads was changed in place.
        """
        recorded = self.recorded
        with recorded.group.owner.lock:
            if recorded.closed:
                raise GraphedBackwardError(
                    f"{recorded.name}: its graphs were freed between this forward and its backward. Call reset() or "
                    "close() when no backward is due."
                )
            if self._done and not recorded.retains:
                raise GraphedBackwardError(
                    f"{recorded.name}: a second backward through one forward; what it needs died in the first. Record "
                    "with GraphedOptions(retain_graph_in_backward=True)."
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
        if not self.recorded.retains:
            self._versions = None
            if self._done:
                self.statics = []
            self.recorded.pending.remove(self)

    def is_due_to(self, recorded: RecordedPass) -> bool:
        """Whether a backward of a recording may still come."""
        return self.recorded is recorded and (recorded.retains or not self._done)


class _Graphed(torch.autograd.Function):
    """Forward and backward as one node."""

    @staticmethod
    def forward(ctx: Any, call: Call, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del wanted  # read where they lie
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward(ctx)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        call: Call = ctx.call
        if all(grad is None for grad in grad_outputs):
            call.settle()
            return (None, *call.recorded.no_gradients)
        if not torch.is_grad_enabled():
            if call.recorded.outputs_read:
                _ = ctx.saved_tensors  # autograd checks here that nobody changed them
            return (None, *call.backward(grad_outputs))
        link = ctx.saved_tensors[call.recorded.link]
        with torch.no_grad():
            grads = call.backward(grad_outputs)
        made = [grad for grad in grads if grad is not None]
        fenced = iter(_NoSecond.apply(call.recorded.name, len(made), *made, link, *grad_outputs))
        return (None, *(grad if grad is None else next(fenced) for grad in grads))


_apply = _torch.direct_apply(_Graphed)


class _NoSecond(torch.autograd.Function):
    """For `create_graph=True`: the gradients' own gradients are an error, and not left out.

    Note [Gradients of gradients]
        Autograd leaves out nodes that lead to nothing that is wanted, an error among them. Gradients depend on the
        gradients that came in and on what the forward read. So this node leads there, too: to the former, and to the
        node of the forward, by a result that the forward saved. That is one that its backward reads, or an empty one
        that is there for this only: the forward's inputs would be held, and hold memory.
    """

    @staticmethod
    def forward(ctx: Any, name: str, num_grads: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(grad.detach() for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        del grad_outputs
        raise GraphedBackwardError(
            f"{ctx.name}: gradients of its gradients were asked for, and none are recorded. Call the original where it "
            "is differentiated twice."
        )
