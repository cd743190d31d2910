"""`RecordedPass`: forward and backward of one callable as graphs."""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass import torch_private
from cgpass.errors import GraphedBackwardError, StaticInputMovedError
from cgpass.graphed.arguments import Arguments
from cgpass.graphed.call import Call
from cgpass.graphed.group import Group
from cgpass.graphed.pending import Aside
from cgpass.graphed.statics import MemberGoneError, Statics
from cgpass.graphed.values import InputMemory, OutputStructure, give_up_samples
from cgpass.graphed.versions import ReadByBackward
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime import fast
from cgpass.runtime.inputs import Placeholder
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
    adds_grads: bool
    """Whether gradients of parameters are added to their `.grad` here."""
    retains: bool
    """Whether a backward leaves what it reads alone."""
    keeps_saved: bool
    """Whether what is recorded later does, too."""
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
        all_wanted = tuple(range(len(self.no_gradients)))
        num_edges = len(self.wanted_inputs) if self.adds_grads else len(all_wanted)
        self.edges, self.direct = all_wanted[:num_edges], all_wanted[num_edges:]
        """See `node.Attach`."""
        self._aside: list[weakref.ref[Call]] = []
        self._writes = self.arguments.are_written or bool(self.written_statics)
        self._grad_memory = [InputMemory(grad.tensor, grad) for grad in self.grads]
        self._grad_targets = [memory.tensor for memory in self._grad_memory]
        self._grads_are_plain = not any(memory.spans for memory in self._grad_memory)
        self.gives_arguments = bool(self.forward.aliases)
        """Whether results are (views of) arguments: autograd's own functions see to it that nobody changes those in place."""
        self.without_grad = [
            i for i in range(len(self.structure.tensors)) if i not in self.outputs_with_grad
        ]

    # ---- forward

    def call(self, tensors: list[torch.Tensor], statics: list[torch.Tensor]) -> Any:
        """Run the forward, with a backward to come if anything requires grad."""
        if self.backward is None or not torch.is_grad_enabled():
            with self.group.owner.lock:
                return self.structure.build(self.run_forward(tensors, statics))
        return self.structure.build(Call(self, statics).run(tensors))

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
            if key == self.forward_key:
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
        if (
            self.weight_grads is not None and self.backward is not None
        ):  # whose outputs are part of it
            self.group.prepare(self.backward, self.pending)
        aside.put_back()

    def run_backward(
        self, grads: Sequence[torch.Tensor | None], statics: list[torch.Tensor], position: Any
    ) -> list[Any]:
        """Copy gradients of the outputs that have some in, and replay."""
        group, recording = self.group, self.backward
        assert recording is not None
        group.prepare(recording, self.pending)
        given = [
            torch.zeros_like(memory.tensor) if grad is None else grad
            for grad, memory in zip(grads, self._grad_memory, strict=True)
        ]
        try:
            if self._grads_are_plain:
                self.stats.copied_bytes += fast.fill(self._grad_targets, given, b"")
            else:
                for grad, memory in zip(given, self._grad_memory, strict=True):
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
        if torch_private.in_vmap_or_functorch():
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
        for due in self.pending.alive():  # nothing that it needs is left to be put aside
            if isinstance(due, Call) and due.is_due_to(self):
                self.pending.remove(due)
        for recording in (self.forward, self.backward, self.weight_grads):
            if recording is not None:
                self.group.owner.close_recording(recording)
