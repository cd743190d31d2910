"""`Pass`: one forward with its sample, and its warm-ups."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgpass.errors import GraphedArgumentError
from cgpass.graphed.arguments import Places
from cgpass.graphed.autograd_graph import GraphFacts, take_gradients
from cgpass.graphed.binding import Binding
from cgpass.graphed.failures import freed_graphs_named
from cgpass.graphed.group import Group
from cgpass.graphed.hooks import HookSet
from cgpass.graphed.kept import KeptState
from cgpass.graphed.options import GraphedOptions
from cgpass.graphed.statics import Statics, firsts
from cgpass.graphed.values import (
    OpaqueResults,
    OutputStructure,
    no_autocast,
    no_autocast_cache,
    tensors_of,
)
from cgpass.recompute.gradients import grads_put_aside
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.writes import SaidToBeWritten
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
    find_statics: Callable[[], Statics]
    """Finds them anew, when modules have other members than they had."""
    hooks: HookSet
    warmup_hooks: HookSet
    options: GraphedOptions
    stats: CallStats
    with_grad: bool
    """Whether a backward is recorded where outputs require grad."""
    opaque: OpaqueResults = field(default_factory=OpaqueResults)
    structure: OutputStructure | None = None
    warm_structure: OutputStructure | None = None
    """Of the last warm-up's result."""
    reentrant: bool = False
    used_inputs: set[int] = field(default_factory=set)
    """Arguments that got a gradient in a warm-up."""
    used_statics: set[int] = field(default_factory=set)
    written_inputs: set[int] = field(default_factory=set)
    written_statics: set[int] = field(default_factory=set)
    saved_inputs: set[int] = field(default_factory=set)
    """Arguments that the graph saved for its backward."""
    saved_statics: set[int] = field(default_factory=set)
    saved_outputs: set[int] = field(default_factory=set)
    """Results without a gradient that it saved."""
    kept: KeptState = field(default_factory=KeptState)
    """Parameters and buffers as they were before the first warm-up."""
    backward_dw: Callable[[], Any] | None = None
    """What makes the gradients that the backward leaves out, of weights, by filling their `.grad`."""
    split_off: set[int] = field(default_factory=set)
    """Parameters that it makes gradients for."""
    reached: set[int] = field(default_factory=set)
    """Parameters that the graph of the forward has nodes for: autograd runs these, with a gradient or without one."""
    _strangers: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Leaves of the last warm-up that are neither arguments nor parameters."""
    due_weight_grads: deque[Any] = field(default_factory=deque)
    """Calls whose backward ran, but not yet what was split off, oldest first."""

    # ---- warm-up

    def new_states(self, device: torch.device) -> CheckpointStates:
        """What the checkpoints of one recording recompute with; for its warm-ups and its captures."""
        return CheckpointStates(device, self.options.rng_tracker)

    def warm_up(
        self, group: Group, states: CheckpointStates, iterations: int, *, pool: bool
    ) -> None:
        """Run forward and backward plainly, and note what they do.

        Args:
            group: Whose driver runs it.
            states: Of the recording that will be made.
            iterations: How often.
            pool: Whether to take memory from the pool, in which nothing was recorded yet.
        """
        number, self.opaque = 0, OpaqueResults()
        while number < iterations:
            number += 1
            copies = [sample.detach().clone() for sample in self.binding.samples]
            inputs = self.binding.leaves(copies)
            args, kwargs = self.binding.call(inputs)
            self.hooks.run("pre_forward", self.hooked, args, kwargs)
            statics = self.statics.now()
            group.accumulators.take(statics)
            self._keep(statics)
            said = SaidToBeWritten(inputs if number == iterations else ())
            run = self._warm_forward(states, args, kwargs, said)
            result = self._noting_writes(group, run, (inputs, statics), pool=pool)
            self._note_written_inputs(said.found)
            facts = self._facts(inputs, statics, result)
            if facts is None:
                self.kept.forget_unwritten()  # before hooks may take the memory away
            del run
            self.hooks.run("forward", self.hooked, args, kwargs, result)
            self.warm_structure = OutputStructure.of(result)
            del args, kwargs, statics, copies
            if facts is not None:
                self._warm_backward(group, inputs, result, facts, pool=pool)
            del result, facts
            self._refuse_strangers()
            self.stats.warmups += 1
            if not self.statics.has_its_members():  # made by a first call
                self.use_statics(self.find_statics())
                iterations = max(iterations, number + 1)
        self._refuse_unused()

    def use_statics(self, statics: Statics) -> None:
        """Have other ones from now on: what is known by position is forgotten."""
        self.statics = statics
        for found in (
            self.used_statics,
            self.written_statics,
            self.saved_statics,
            self.split_off,
            self.reached,
        ):
            found.clear()

    def _warm_forward(
        self,
        states: CheckpointStates,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        said: SaidToBeWritten,
    ) -> BoxedCallable:
        def forward(_: list[Any]) -> list[Any]:
            with self.grad_mode(), states, said if said.watches else contextlib.nullcontext():
                return [self.run(*args, **kwargs)]

        return forward

    def _noting_writes(
        self,
        group: Group,
        run: BoxedCallable,
        read: tuple[list[torch.Tensor], list[torch.Tensor]],
        *,
        pool: bool,
    ) -> Any:
        versions = [[tensor._version for tensor in tensors] for tensors in read]
        with no_autocast_cache():
            (result,) = group.driver.warm_up(run, []) if pool else run([])
        self.opaque.check(self.name, result)
        self._refuse_assigned(read[1])
        for tensors, before, written in zip(
            read, versions, (self.written_inputs, self.written_statics), strict=True
        ):
            written.update(
                i for i, (t, v) in enumerate(zip(tensors, before, strict=True)) if t._version != v
            )
        return result

    def _note_written_inputs(self, found: set[int]) -> None:
        self.written_inputs |= found
        for i in self.written_inputs:
            if self.binding.requires_grad[i]:
                raise GraphedArgumentError(
                    f"make_graphed_callables: {self.name} writes {self.binding.name_of(i)} in place, which requires "
                    "grad. Have it write a copy."
                )

    def _refuse_assigned(self, before: Sequence[torch.Tensor]) -> None:
        """Have nothing assigned that graphs read where it lies: no replay would."""
        now = self.statics.now()
        other = [i for i, tensor in enumerate(before) if now[i] is not tensor]
        for i in other:
            self.statics.put(i, before[i])
        if other:
            names = ", ".join(self.statics.names[i] for i in other)
            raise GraphedArgumentError(
                f"make_graphed_callables: {self.name} assigns {names} anew when it runs, which no replay would do. Have "
                "it write in place, as in self.buffer.copy_(value) or self.buffer.add_(1)."
            )

    def refuse_other_structure(self, structure: OutputStructure) -> None:
        """Have a result made as the last warm-up's: calls get it as it was captured."""
        before = self.warm_structure
        if before is not None and not structure.is_like(before):
            raise GraphedArgumentError(
                f"make_graphed_callables: {self.name} returned {structure} when it was captured, and {before} in the "
                "warm-up before. What it returns may not depend on how often it has run."
            )

    def _keep(self, statics: Sequence[torch.Tensor]) -> None:
        first = firsts(statics)
        num_parameters = sum(i < self.statics.num_parameters for i in first)
        self.kept.keep([statics[i] for i in first], num_parameters)

    def _warm_backward(
        self,
        group: Group,
        inputs: list[torch.Tensor],
        result: Any,
        facts: GraphFacts,
        *,
        pool: bool,
    ) -> None:
        outputs = [out for out in tensors_of(result) if out.requires_grad]
        self.reentrant |= facts.is_reentrant
        self._note_leaves(group, facts.leaves, inputs)
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

        with no_autocast_cache(), freed_graphs_named(self.name):
            grads = group.driver.warm_up(backward, []) if pool else backward([])
        for tensor, grad in zip(wanted, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise GraphedArgumentError(
                    f"make_graphed_callables: {self.name} gives {self._name_of(tensor, inputs)} a gradient of layout "
                    f"{grad.layout}, which no graph can hand out. Have it make dense ones (sparse=False of an "
                    "embedding), or leave the module out."
                )
        got = {id(t) for t, grad in zip(wanted, grads, strict=True) if grad is not None}
        self.used_inputs.update(i for i, t in enumerate(inputs) if id(t) in got)
        self.used_statics.update(i for i, t in enumerate(statics) if id(t) in got)
        del grads
        self.split_off.update(i for i, grad in self.run_backward_dw(statics).items())
        self.kept.forget_unwritten()
        self.hooks.run("backward", self.hooked)

    def _facts(
        self, inputs: Sequence[torch.Tensor], statics: Sequence[torch.Tensor], result: Any
    ) -> GraphFacts | None:
        """What the graph of a result says, if it is to have a backward."""
        outputs = list(tensors_of(result))
        with_grad = [out for out in outputs if out.requires_grad]
        if not with_grad or not self.with_grad:
            return None
        facts = GraphFacts(with_grad)
        saved, read = Places(facts.saved), Places([*inputs, *statics])
        facts.saved.clear()
        self.saved_inputs.update(i for i, t in enumerate(inputs) if saved.meet(t))
        self.saved_statics.update(i for i, t in enumerate(statics) if saved.meet(t))
        self.saved_outputs.update(
            i
            for i, t in enumerate(outputs)
            if not t.requires_grad and saved.meet(t) and not read.meet(t)
        )
        return facts

    def _name_of(self, leaf: torch.Tensor, inputs: Sequence[torch.Tensor]) -> str:
        """What the user calls an argument, parameter or buffer."""
        names = [*self.binding.names, *self.statics.names]
        return next(
            name for name, t in zip(names, (*inputs, *self.statics.now()), strict=True) if t is leaf
        )

    def run_backward_dw(self, statics: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients of weights that were split off, by position; no `.grad` changes."""
        if self.backward_dw is None:
            return {}
        first = {i: statics[i] for i in firsts(statics)}
        with grads_put_aside(list(first.values())), torch.no_grad(), no_autocast(statics):
            self.backward_dw()
            return {i: t.grad for i, t in first.items() if t.grad is not None}

    def _note_leaves(
        self, group: Group, leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        statics, found = self.statics.now(), set(map(id, leaves))
        self.reached.update(i for i, t in enumerate(statics) if id(t) in found)
        known = {id(t) for t in (*inputs, *statics)}
        if not self.statics.has_its_members():  # made by this first call
            return
        for leaf in leaves:
            if id(leaf) not in known and leaf.device == group.device and leaf.numel():
                self._strangers.append(weakref.ref(leaf))

    def _refuse_strangers(self) -> None:
        for ref in self._strangers:
            leaf = ref()
            if leaf is not None:  # so the run did not make it
                raise GraphedArgumentError(
                    f"make_graphed_callables: {self.name} uses a tensor of shape {list(leaf.shape)} that requires grad and "
                    "is neither an argument nor a parameter of its modules. Name the module that has it, as in "
                    "make_graphed_callables(fn, sample_args, modules=(model,)), or pass it as an argument."
                )
        self._strangers.clear()

    def _refuse_unused(self) -> None:
        if self.options.allow_unused_input or not (self.used_inputs or self.used_statics):
            return
        unused = [
            self.binding.name_of(i)
            for i, requires_grad in enumerate(self.binding.requires_grad)
            if requires_grad and i not in self.used_inputs
        ]
        statics, used = self.statics.now(), self.used_statics | self.split_off
        unused += [
            f"parameter {self.statics.names[i]}"
            for i in firsts(statics)
            if i < self.statics.num_required and statics[i].requires_grad and i not in used
        ]
        if unused:
            raise GraphedArgumentError(
                f"make_graphed_callables: {self.name} gives no gradient to {', '.join(unused)}. Have them not require "
                "grad, or set GraphedOptions(allow_unused_input=True)."
            )

    def grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        """Whether autograd watches the forward."""
        return torch.enable_grad() if self.with_grad else torch.no_grad()
