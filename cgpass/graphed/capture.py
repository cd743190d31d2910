"""Warm-ups and captures of one forward and its backward, with the hooks around them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cgpass import _torch
from cgpass.errors import GraphedArgumentError
from cgpass.graphed.autograd_graph import GraphFacts, outputs_read_by_graph, take_gradients
from cgpass.graphed.binding import Binding
from cgpass.graphed.failures import blamed
from cgpass.graphed.group import Group
from cgpass.graphed.hooks import HookSet
from cgpass.graphed.options import GraphedOptions
from cgpass.graphed.recorded import InputMemory, OutputStructure, RecordedPass
from cgpass.graphed.target import Statics
from cgpass.recompute.gradients import grads_put_aside
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.placeholders import Placeholder, bytes_of, overlaps_itself
from cgpass.runtime.recording import Recording
from cgpass.telemetry import CallStats


@dataclass(eq=False)
class Pass:
    """One forward with its sample: what it takes to record it, now and again."""

    name: str
    run: Callable[..., Any]
    """The callable without a graph."""
    hooked: Any
    """What hooks get as `module`."""
    binding: Binding
    statics: Statics
    hooks: HookSet
    warmup_hooks: HookSet
    options: GraphedOptions
    stats: CallStats
    with_grad: bool
    """Whether a backward is recorded where outputs require grad."""
    structure: OutputStructure | None = None
    reentrant: bool = False
    used_inputs: set[int] = field(default_factory=set)
    """Arguments that got a gradient in a warm-up."""
    used_statics: set[int] = field(default_factory=set)
    written_inputs: set[int] = field(default_factory=set)
    written_statics: set[int] = field(default_factory=set)
    changed_buffers: set[int] = field(default_factory=set)
    """Buffers that the callable writes, with or without autograd knowing."""
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Buffers as they were before the first warm-up, by position."""
    backward_dw: Callable[[], Any] | None = None
    """What makes the gradients that the backward leaves out, of weights, by filling their `.grad`."""
    split_off: set[int] = field(default_factory=set)
    """Parameters that it makes gradients for."""

    # ---- warm-up

    def new_states(self, device: torch.device) -> CheckpointStates:
        """What the checkpoints of one recording recompute with; for its warm-ups and its captures."""
        return CheckpointStates(device, self.options.rng_tracker)

    def warm_up(self, group: Group, states: CheckpointStates, iterations: int, *, pool: bool) -> None:
        """Run forward and backward plainly, and note what they do.

        Args:
            group: Whose driver runs it.
            states: Of the recording that will be made.
            iterations: How often.
            pool: Whether to take memory from the pool, in which nothing was recorded yet.
        """
        for _ in range(iterations):
            inputs = [sample.detach().clone() for sample in self.binding.samples]
            for tensor, requires_grad in zip(inputs, self.binding.requires_grad, strict=True):
                tensor.requires_grad_(requires_grad)
            args, kwargs = self.binding.call(inputs)
            self.hooks.run("pre_forward", self.hooked, args, kwargs)
            statics = self.statics.now()
            self._keep_buffers(statics)
            result = self._warm_forward(group, states, (args, kwargs), (inputs, statics), pool=pool)
            self.hooks.run("forward", self.hooked, args, kwargs, result)
            del args, kwargs, statics
            self._warm_backward(group, inputs, result, pool=pool)
            del result
            self.stats.warmups += 1
        self._refuse_unused()

    def _warm_forward(
        self,
        group: Group,
        states: CheckpointStates,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        read: tuple[list[torch.Tensor], list[torch.Tensor]],
        *,
        pool: bool,
    ) -> Any:
        args, kwargs = arguments
        versions = [[tensor._version for tensor in tensors] for tensors in read]

        def forward(_: list[Any]) -> list[Any]:
            with self._grad_mode(), states:
                return [self.run(*args, **kwargs)]

        with _no_autocast_cache():
            (result,) = group.driver.warm_up(forward, []) if pool else forward([])
        self.changed_buffers.update(
            i for i, (buffer, before) in self.buffers.items() if not torch.equal(buffer, before)
        )
        for tensors, before, written in zip(
            read, versions, (self.written_inputs, self.written_statics), strict=True
        ):
            written.update(
                i for i, (t, v) in enumerate(zip(tensors, before, strict=True)) if t._version != v
            )
        for i in self.written_inputs:
            if self.binding.requires_grad[i]:
                raise GraphedArgumentError(
                    f"make_graphed_callables: {self.name} writes {self.binding.name_of(i)} in place, which requires "
                    "grad. Have it write a copy."
                )
        return result

    def _keep_buffers(self, statics: Sequence[torch.Tensor]) -> None:
        for i in range(self.statics.num_parameters, len(statics)):
            if i not in self.buffers and not statics[i].requires_grad:
                self.buffers[i] = (statics[i], statics[i].detach().clone())

    def put_buffers_back(self) -> None:
        """Undo what warm-ups and captures wrote into buffers."""
        with torch.no_grad():
            for i, (buffer, before) in self.buffers.items():
                if i in self.changed_buffers and buffer.untyped_storage().nbytes():
                    buffer.copy_(before)
        self.buffers.clear()

    def _warm_backward(
        self, group: Group, inputs: list[torch.Tensor], result: Any, *, pool: bool
    ) -> None:
        outputs = [out for out in _tensors(result) if out.requires_grad]
        if not outputs or not self.with_grad:
            return
        facts = GraphFacts(outputs)
        self.reentrant |= facts.is_reentrant
        self._note_leaves(facts.leaves, inputs, group.device)
        self.hooks.run("pre_backward", self.hooked)
        statics = self.statics.now()
        wanted = [t for t in (*inputs, *statics) if t.requires_grad]

        def backward(_: list[Any]) -> list[Any]:
            return list(
                take_gradients(
                    outputs,
                    [torch.zeros_like(out) for out in outputs],
                    wanted,
                    reentrant=self.reentrant,
                    retain_graph=False,
                )
            )

        with _no_autocast_cache():
            grads = group.driver.warm_up(backward, []) if pool else backward([])
        got = {id(t) for t, grad in zip(wanted, grads, strict=True) if grad is not None}
        self.used_inputs.update(i for i, t in enumerate(inputs) if id(t) in got)
        self.used_statics.update(i for i, t in enumerate(statics) if id(t) in got)
        del grads
        self.split_off.update(i for i, grad in self.run_backward_dw(statics).items())
        self.hooks.run("backward", self.hooked)

    def run_backward_dw(self, statics: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients of weights that were split off, by position; no `.grad` changes."""
        if self.backward_dw is None:
            return {}
        with grads_put_aside(statics), torch.no_grad():
            self.backward_dw()
            return {i: t.grad for i, t in enumerate(statics) if t.grad is not None}

    def _note_leaves(
        self, leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        known = {id(t) for t in (*inputs, *self.statics.now())}
        for leaf in leaves:
            if id(leaf) not in known and leaf.device == device and leaf.numel():
                known.add(id(leaf))
                self.statics.add_leaf(leaf)

    def _refuse_unused(self) -> None:
        if self.options.allow_unused_input or not (self.used_inputs or self.used_statics):
            return
        unused = [
            self.binding.name_of(i)
            for i, requires_grad in enumerate(self.binding.requires_grad)
            if requires_grad and i not in self.used_inputs
        ]
        unused += [
            f"parameter {name}"
            for i, (name, t) in enumerate(zip(self.statics.names, self.statics.now(), strict=True))
            if i < self.statics.num_parameters
            and t.requires_grad
            and i not in self.used_statics | self.split_off
        ]
        if unused:
            raise GraphedArgumentError(
                f"make_graphed_callables: {self.name} gives no gradient to {', '.join(unused)}. Have them not require "
                "grad, or set GraphedOptions(allow_unused_input=True)."
            )

    def _grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.enable_grad() if self.with_grad else torch.no_grad()


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
        self._leaves = [
            m.tensor.detach().requires_grad_(wanted)
            for m, wanted in zip(memory, description.binding.requires_grad, strict=True)
        ]
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
        before = group.driver.live_blocks(self._slot)

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with d._grad_mode(), _no_autocast_cache(), self._states, self._watched():
                self._result = d.run(*args, **kwargs)
            self._outputs = list(_tensors(self._result))
            self._read = outputs_read_by_graph(self._outputs)
            return [out.detach() for out in self._outputs]

        with self._blamed("forward"):
            self.forward = group.new_recording(
                run,
                [*[m.tensor for m in self.memory], *statics],
                self._slot,
                d.stats,
                generators=self._states.generators,
            )
        d.structure = OutputStructure.of(self._result)
        self._footprint = [*self._outlived(before), *[m.tensor for m in self.memory]]
        self.forward.replay()  # where a capture computes nothing, the backward's reads values all the same
        d.hooks.run("forward", d.hooked, args, kwargs, self._result)
        self._result = None

    def _outlived(self, before: dict[int, int]) -> list[torch.Tensor]:
        """Blocks of the pool, as bytes, that are in use now and were not before. **Lifetime:** they own nothing."""
        device = self._group.device
        return [
            bytes_of(_torch.storage_at(address, num_bytes, device))
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
        self._wanted = (
            [i for i in sorted(d.used_inputs) if self._leaves[i].requires_grad],
            [i for i in sorted(d.used_statics | d.split_off) if statics[i].requires_grad],
        )
        wanted = [self._leaves[i] for i in self._wanted[0]]
        wanted += [statics[i] for i in self._wanted[1]]
        shared = d.backward_dw is None  # which may read what the gradients lie in
        self._grads = group.grad_placeholders(with_grad, shared=shared)
        for grad in self._grads:
            grad.target.zero_()
        before = group.driver.live_blocks(self._slot)

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with _no_autocast_cache(), self._watched():
                grads = take_gradients(
                    with_grad,
                    [grad.tensor for grad in self._grads],
                    wanted,
                    reentrant=d.reentrant,
                    retain_graph=d.options.retain_graph_in_backward,
                )
            return [grad if grad is None else grad.detach() for grad in grads]

        with self._blamed("backward"):
            self.backward = group.new_recording(
                run,
                [*[grad.tensor for grad in self._grads], *statics, *[m.tensor for m in self.memory]],
                self._slot,
                d.stats,
                own=group.own_grads,
                generators=self._states.generators,
            )
        if d.backward_dw is not None:
            self._footprint += [*self._outlived(before), *[grad.tensor for grad in self._grads]]
            self._capture_weight_grads(statics)
        d.hooks.run("backward", d.hooked)

    def _capture_weight_grads(self, statics: Sequence[torch.Tensor]) -> None:
        d, group = self.description, self._group
        assert self.backward is not None
        self.backward.replay()

        def run(given: list[Any]) -> list[Any]:
            given.clear()
            with _no_autocast_cache(), self._watched():
                grads = d.run_backward_dw(statics)
            return [grads[i].detach() for i in sorted(d.split_off)]

        with self._blamed("backward_dw"):
            self._weight_grads = group.new_recording(
                run,
                [*statics, *self._footprint],
                self._slot,
                d.stats,
                own=group.own_grads,
            )

    def _blamed(self, what: str) -> contextlib.AbstractContextManager[Any]:
        if self._watch is not None:
            return contextlib.nullcontext()
        return blamed(self.description.name, what, self._again)

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        return self._watch or contextlib.nullcontext()

    def _again(self, watch: contextlib.AbstractContextManager[Any]) -> None:
        """Capture once more, into a pool of its own and without hooks; keeps nothing."""
        d, group = self.description, self._group
        quiet = dataclasses.replace(d, hooks=HookSet(None, (), ""), stats=CallStats())
        other = Capture(quiet, group, self._states, group.owner.new_slot(), self.memory)
        other._watch = watch
        other.capture_forward()
        other.capture_backward()

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
            inputs=self.memory,
            written_inputs=sorted(d.written_inputs),
            written_statics=sorted(d.written_statics),
            checks_statics=d.options.static_input_check != "off",
            retains=retains,
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
            outputs_read=self._read if self.backward is not None else [],
            grads=self._grads,
            weight_grads=self._weight_grads,
            weight_grads_for=sorted(d.split_off),
        )
        self._outputs = []
        return recorded


def sample_memory(sample: torch.Tensor) -> InputMemory | None:
    """The memory of a sample as that of an argument, unless a graph can't take it as it is."""
    if overlaps_itself(sample) or sample.is_conj() or sample.is_neg() or sample.is_inference():
        return None
    return InputMemory(sample.detach())


def own_memory(like: torch.Tensor) -> InputMemory:
    """New memory for an argument."""
    placeholder = Placeholder(like.detach())
    placeholder.copy_from(like.detach())
    return InputMemory(placeholder.tensor, placeholder)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Have autocast cast every weight anew: a cast weight of another run would be no part of the graph."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
