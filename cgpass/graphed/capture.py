"""`Capture`: makes the recordings of one pass, with the hooks around them."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgpass import torch_private
from cgpass.graphed.arguments import Arguments
from cgpass.graphed.autograd_graph import outputs_read_by_graph, take_gradients
from cgpass.graphed.failures import blamed
from cgpass.graphed.group import Group
from cgpass.graphed.hooks import HookSet
from cgpass.graphed.moves import not_moved
from cgpass.graphed.passes import Pass
from cgpass.graphed.recorded import RecordedPass
from cgpass.graphed.statics import firsts
from cgpass.graphed.values import (
    InputMemory,
    OutputStructure,
    give_up_samples,
    no_autocast_cache,
    tensors_of,
)
from cgpass.graphed.versions import ReadByBackward
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.inputs import Placeholder, bytes_of
from cgpass.telemetry import CallStats

if TYPE_CHECKING:
    from cgpass.runtime.recording import Recording


class Capture:
    """Records one pass: the forward, and later the backward."""

    def __init__(
        self,
        description: Pass,
        group: Group,
        states: CheckpointStates,
        slot: int,
        memory: Sequence[InputMemory],
    ) -> None:
        """Args: description: what to record. memory: where its arguments will be read."""
        self.description = description
        self.memory = list(memory)
        self._group = group
        self._states = states
        self._slot = slot
        self._leaves = description.binding.leaves([m.tensor for m in memory])
        self._result: Any = None
        self._outputs: list[torch.Tensor] = []
        self._read: list[int] = []
        self._footprint: list[torch.Tensor] = []
        self.forward: Recording | None = None
        self.backward: Recording | None = None
        self._grads: list[Placeholder] = []
        self._keys = [b"", b""]
        self._watch: contextlib.AbstractContextManager[Any] | None = None
        """What looks for the operator that made a capture fail."""
        self._wanted: tuple[list[int], list[int]] = ([], [])
        self._weight_grads: Recording | None = None

    def capture_forward(self) -> None:
        """Record the forward, with its hooks around."""
        d, group = self.description, self._group
        args, kwargs = d.binding.call(self._leaves)
        d.hooks.run("pre_forward", d.hooked, args, kwargs)
        statics = d.statics.now()
        self._keys[0] = d.statics.key_of(statics)
        group.accumulators.take(statics)
        before = group.driver.live_blocks(self._slot)
        d.binding.keep_constants()

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with (
                d.grad_mode(),
                no_autocast_cache(),
                self._states,
                self._watched(),
                not_moved(d.name, d.statics, statics),
            ):
                self._result = d.run(*args, **kwargs)
            d.hidden.check(d.name, self._result)
            d.refuse_other_structure(OutputStructure.of(self._result))
            d.binding.refuse_changed()
            self._outputs = list(tensors_of(self._result))
            self._read = outputs_read_by_graph(self._outputs)
            return [out.detach() for out in self._outputs]

        with self._blamed("forward"), self._attributes_watched():
            self.forward = group.new_recording(
                run,
                [*[m.tensor for m in self.memory], *statics],
                self._slot,
                d.stats,
                label=f"forward of {d.name}, graphed by hand",
                generators=self._states.generators,
            )
        d.structure = OutputStructure.of(self._result)
        self._footprint = [*self._outlived(before), *[m.target for m in self.memory]]
        self.forward.replay()  # where a capture computes nothing, the backward's reads values all the same
        d.hooks.run("forward", d.hooked, args, kwargs, self._result)
        self._result = None

    def _outlived(self, before: dict[int, int]) -> list[torch.Tensor]:
        """Blocks of the pool, as bytes, that are in use now and were not before. **Lifetime:** they own nothing."""
        device = self._group.device
        return [
            bytes_of(torch_private.storage_at(address, num_bytes, device))
            for address, num_bytes in self._group.driver.live_blocks(self._slot).items()
            if address not in before
        ]

    def capture_backward(self) -> None:
        """Record the backward, with its hooks around, if there is one."""
        d, group = self.description, self._group
        with_grad = [out for out in self._outputs if out.requires_grad]
        if not with_grad or not d.with_grad:
            self._outputs = []
            return
        d.hooks.run("pre_backward", d.hooked)
        statics = d.statics.now()
        self._keys[1] = d.statics.key_of(statics)
        used = d.used_statics | d.reached  # hooks of what is reached run without a gradient, too
        self._wanted = (
            [i for i in sorted(d.used_inputs) if self._leaves[i].requires_grad],
            [i for i in sorted(used.intersection(firsts(statics))) if statics[i].requires_grad],
        )
        wanted = [self._leaves[i] for i in self._wanted[0]]
        wanted += [statics[i] for i in self._wanted[1]]
        shared = d.backward_dw is None  # which may read what the gradients lie in
        self._grads = group.grad_placeholders(with_grad, shared=shared)
        for grad in self._grads:
            grad.target.zero_()
        before = group.driver.live_blocks(self._slot)

        known = [*[grad.tensor for grad in self._grads], *statics, *[m.tensor for m in self.memory]]

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with no_autocast_cache(), self._watched():
                grads = take_gradients(
                    with_grad,
                    [grad.tensor for grad in self._grads],
                    wanted,
                    reentrant=d.reentrant,
                    retain_graph=d.options.retain_graph_in_backward,
                )
            return _apart(grads, [*known, *with_grad])

        with self._attributes_watched(of_backward=True):
            with self._blamed("backward"):
                self.backward = group.new_recording(
                    run,
                    known,
                    self._slot,
                    d.stats,
                    label=f"backward of {d.name}, graphed by hand",
                    own=group.own_grads,
                    generators=self._states.generators,
                )
            if d.backward_dw is not None:
                self._footprint += [*self._outlived(before), *[g.tensor for g in self._grads]]
                self._capture_weight_grads(statics)
        d.hooks.run("backward", d.hooked)

    def _capture_weight_grads(self, statics: Sequence[torch.Tensor]) -> None:
        d, group = self.description, self._group
        assert self.backward is not None
        self.backward.replay()

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with no_autocast_cache(), self._watched():
                grads = d.run_backward_dw(statics)
            return _apart([grads[i] for i in sorted(d.split_off)], [*statics, *self._footprint])

        with self._blamed("backward_dw"):
            self._weight_grads = group.new_recording(
                run,
                [*statics, *self._footprint],
                self._slot,
                d.stats,
                label=f"weight gradients of {d.name}, graphed by hand",
                own=group.own_grads,
            )

    def _blamed(self, what: str) -> contextlib.AbstractContextManager[Any]:
        if self._watch is not None:
            return contextlib.nullcontext()
        return blamed(self.description.name, what, self._again)

    def _attributes_watched(
        self, *, of_backward: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        if self._watch is not None:
            return contextlib.nullcontext()
        return self.description.attributes.watched(of_backward=of_backward)

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        return self._watch or contextlib.nullcontext()

    def _again(self, watch: contextlib.AbstractContextManager[Any]) -> None:
        """Capture once more, into a pool of its own and without hooks; keeps nothing."""
        d, group = self.description, self._group
        quiet = dataclasses.replace(d, hooks=HookSet(None, (), ""), stats=CallStats())
        other = Capture(quiet, group, self._states, group.owner.new_slot(), self.memory)
        other._watch = watch
        try:
            other.capture_forward()
            other.capture_backward()
        finally:
            other.give_up()

    def _outputs_read(self) -> list[int]:
        """Outputs in whose memory the backward reads."""
        if self.backward is None:
            return []
        return sorted({*self._read, *self.description.saved_outputs})

    def _read_by_backward(self) -> ReadByBackward:
        d = self.description
        statics: dict[int, str] = {}
        samples: dict[str, torch.Tensor] = {}
        if self.backward is not None:
            statics = {i: d.statics.names[i] for i in sorted(d.saved_statics)}
            samples = {
                d.binding.name_of(i): self.memory[i].tensor
                for i in sorted(d.saved_inputs)
                if not self.memory[i].is_own
            }
        return ReadByBackward(d.name, statics, samples)

    def give_up(self) -> None:
        """Free what was recorded before a later part failed."""
        give_up_samples(self.memory)
        for recording in (self.forward, self.backward, self._weight_grads):
            if recording is not None:
                self._group.owner.close_recording(recording)

    def finish(self) -> RecordedPass:
        """The recorded pass; this object is of no more use."""
        d = self.description
        assert self.forward is not None
        assert d.structure is not None
        retains = d.options.retain_graph_in_backward
        held = [self._outputs] if retains else []
        recorded = RecordedPass(
            name=d.name,
            group=self._group,
            statics=d.statics,
            stats=d.stats,
            states=self._states,
            arguments=Arguments(
                self.memory,
                d.binding.names,
                sorted(d.written_inputs),
                d.statics.now(),
                [i for i in sorted(self.forward.viewed) if i < len(self.memory)],
            ),
            written_statics=sorted(d.written_statics),
            adds_grads=d.options.parameter_grads == "direct",
            checks_statics=d.options.static_input_check != "off",
            retains=retains,
            keeps_saved=retains and self._weight_grads is None and not d.options.reuse_buffers,
            forward=self.forward,
            forward_key=self._keys[0],
            structure=d.structure,
            footprint=self._footprint,
            held=held,
            backward=self.backward,
            backward_key=self._keys[1],
            wanted_inputs=self._wanted[0],
            wanted_statics=self._wanted[1],
            outputs_with_grad=[i for i, out in enumerate(self._outputs) if out.requires_grad],
            outputs_read=self._outputs_read(),
            read=self._read_by_backward(),
            grads=self._grads,
            weight_grads=self._weight_grads,
            weight_grads_for=sorted(d.split_off),
            due_weight_grads=d.due_weight_grads,
        )
        self._outputs = []
        return recorded


def _apart(
    grads: Sequence[torch.Tensor | None], known: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients in memory of their own, each: they are their receiver's, who may add to them in place.

    Args:
        grads: As a backward gives them, which may be views of each other and of what came in.
        known: What else they must not share memory with.
    """
    taken = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: list[torch.Tensor | None] = []
    for grad in grads:
        if grad is None:
            found.append(None)
            continue
        address = grad.untyped_storage().data_ptr()
        found.append(grad.detach().clone() if address in taken else grad.detach())
        taken.add(address)
    return found
