"""From the parts of a graph to the executor's plan: slots, steps and what each may drop."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from cgpass.compile.facts.capturability import is_argument
from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.facts.lines import user_line
from cgpass.compile.facts.values import attribute, graph_outputs
from cgpass.compile.passes.outline import Part, resolve
from cgpass.runtime.executor import Executor, Plan, Step
from cgpass.runtime.partition import PartitionRunner


def build_plan(
    gm: fx.GraphModule, parts: Sequence[Part], runs: Mapping[str, Any], visible: frozenset[int]
) -> Plan:
    """Plan the calls of a graph of several parts: `runs` by their names, `visible` positions of outputs that the user gets."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    slots = {node: at for at, node in enumerate(placeholders)}
    constants: list[tuple[int, Any]] = []
    steps: list[Step] = []
    new_slot = itertools.count(len(placeholders)).__next__

    def constant(value: Any) -> int:
        constants.append((new_slot(), value))
        return constants[-1][0]

    def slot_of(value: fx.Node) -> int:
        """Return a value's slot; attributes and numbers get theirs on first use."""
        node = resolve(value)
        if node not in slots and node.op == "get_attr":
            slots[node] = constant(attribute(gm, str(node.target)))
        elif node not in slots:
            inputs = tuple(map(slot_of, node.all_input_nodes))
            slots[node] = new_slot()
            run = Argument(node.meta["val"].device) if is_argument(node) else _host_step(node)
            steps.append(Step(node.name, run, inputs, (slots[node],)))
        return slots[node]

    for node in filter(is_argument, gm.graph.nodes):
        slot_of(node)  # before what writes the input that it is made of
    for part in parts:
        inputs = tuple(map(slot_of, part.inputs))
        outputs = tuple(new_slot() for _ in part.outputs)
        slots.update(zip(part.outputs, outputs, strict=True))
        made = outputs_made(part.gm)
        steps.append(Step(part.name, runs[part.name], inputs, outputs, made=made))
    results = tuple(
        slot_of(value) if isinstance(value, fx.Node) else constant(value)
        for value in graph_outputs(gm)
    )
    needed = {*results, *(slot for slot, _ in constants)}
    for i, step in reversed([*enumerate(steps)]):  # each drops what no later one reads
        steps[i] = replace(
            step, drops=tuple(s for s in dict.fromkeys(step.inputs) if s not in needed)
        )
        needed.update(step.inputs)
    return Plan(len(placeholders), new_slot(), tuple(steps), results, tuple(constants), visible)


def whole_plan(
    num_inputs: int,
    num_outputs: int,
    run: Any,
    name: str,
    visible: frozenset[int],
    made: tuple[str, ...] = (),
) -> Plan:
    """The plan of a graph that is one partition."""
    outputs = tuple(range(num_inputs, num_inputs + num_outputs))
    inputs = tuple(range(num_inputs))
    step = Step(name, run, inputs, outputs, drops=inputs, made=made)
    return Plan(num_inputs, num_inputs + num_outputs, (step,), outputs, visible=visible)


def outputs_made(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return a description of each output of a partition, for messages: the node's name and the user's line."""
    made = []
    for value in graph_outputs(gm):
        line = user_line(value) if isinstance(value, fx.Node) else None
        made.append(f"{value} at {line}" if line else str(value))
    return tuple(made)


_BY_VALUE: Final = frozenset(
    {torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.complex128}
)
"""Dtypes of what Python's and NumPy's numbers become, every value of which `torch.full` takes as a number."""


class Argument:
    """Puts a CPU scalar on the device. As a kernel's argument where it can: nothing is staged, nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """See `Step.run`; what lies on the device already stays there."""
        (scalar,) = values
        if scalar.device.type == "cpu" and scalar.dtype in _BY_VALUE:
            return (torch.full((), scalar.item(), dtype=scalar.dtype, device=self._device),)
        return (scalar.to(self._device, non_blocking=True),)


@dataclass(frozen=True)
class Single:
    """A plan with one partition, before which nothing is done but to put CPU scalars on the device."""

    plan: Plan
    runner: PartitionRunner
    arguments: Mapping[int, Argument]
    """Inputs of the graph that are such scalars."""

    @classmethod
    def of(cls, plan: Plan) -> "Single | None":
        """The same of a plan; None if it does more, or the partition does not read all other inputs."""
        *first, last = plan.steps
        moved = {step.inputs[0]: step.run for step in first if isinstance(step.run, Argument)}
        if plan.constants or len(moved) != len(first) or not isinstance(last.run, PartitionRunner):
            return None
        known = {*last.inputs, *moved}
        if not known.issuperset(range(plan.num_inputs)):
            return None
        return cls(plan, last.run, moved)

    def infos(self) -> list[InputInfo]:
        """Facts about each input of the graph, scalars on the device among them."""
        known = dict(zip(self.plan.steps[-1].inputs, self.runner.layout.infos, strict=True))
        return [
            known.get(n) or InputInfo(f"number {n}", InputKind.COPIED)
            for n in range(self.plan.num_inputs)
        ]

    def alone(self) -> Executor:
        """Make what calls the graph without its runner, with the scalars on the device already."""
        *first, last = self.plan.steps
        steps = (*(replace(step, run=list) for step in first), replace(last, run=self.runner.fn))
        return Executor(replace(self.plan, steps=steps), None)


def _host_step(node: fx.Node) -> Callable[[list[Any]], Sequence[Any]]:
    readers = node.all_input_nodes
    target = node.target
    assert callable(target)

    def run(values: list[Any]) -> Sequence[Any]:
        env = dict(zip(readers, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        return (target(*args, **kwargs),)

    return run
