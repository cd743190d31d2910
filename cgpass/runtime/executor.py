"""Runs the partitions of a graph in order: a flat list of steps over precomputed slots."""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.changes import mend, open_modes
from cgpass.runtime.fast import taker
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.recording import Recording
from cgpass.telemetry import CallStats

_profiler = torch_private.profiler_state


@dataclass(frozen=True)
class Step:
    """One partition: which slots it reads, writes and drops."""

    name: str
    run: PartitionRunner | Callable[[list[Any]], Sequence[Any]]
    """A runner, or a plain callable that takes one list and may empty it."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[int, ...] = ()
    """Slots whose last reader this step is."""
    made: tuple[str, ...] = ()
    """Each output, for messages: the node's name and the user's line."""


@dataclass(frozen=True)
class Plan:
    """A graph's steps. Slots 0 to num_inputs - 1 hold the call's inputs."""

    num_inputs: int
    num_slots: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    """Slot of each output of the graph."""
    constants: tuple[tuple[int, Any], ...] = ()
    """Slots filled before the first step: constant outputs, attributes of the graph."""
    visible: frozenset[int] = frozenset()
    """Positions of outputs that the user gets."""


Run = Callable[[list[Any]], tuple[Sequence[Any], Recording | None]]
"""Runs a step: its outputs, and the recording that made them."""


def ranged(run: Run, name: str) -> Run:
    """`run`, as a range of a profile."""

    def within(values: list[Any]) -> Any:
        with torch_private.profiler_range(name):
            return run(values)

    return within


def _plainly(fn: Callable[[list[Any]], Sequence[Any]]) -> Run:
    """A plain callable with a runner's results: its outputs, and no recording."""
    return lambda values: (fn(values), None)


def _runs(positions: Sequence[int]) -> list[tuple[slice, slice]]:
    """Positions as runs of consecutive ones: where each lies, and which of as many values belong there."""
    begins = [n for n, p in enumerate(positions) if n == 0 or p != positions[n - 1] + 1]
    runs = zip(begins, [*begins[1:], len(positions)], strict=False)
    return [(slice(positions[a], positions[a] + b - a), slice(a, b)) for a, b in runs]


class Executor:
    """Calls a plan's steps; boxed calling convention."""

    def __init__(
        self, plan: Plan, owner: Owner | None, names: Mapping[str, str] | None = None
    ) -> None:
        self.plan = plan
        self.owner = owner
        self.tally = CallStats()
        self._names = [(names or {}).get(step.name) for step in plan.steps]
        self._lock = contextlib.nullcontext() if owner is None else owner.lock
        self._template: list[Any] = [None] * (plan.num_slots - plan.num_inputs)
        for slot, value in plan.constants:
            self._template[slot - plan.num_inputs] = value
        self._make_steps([])
        self._take_outputs = taker(plan.outputs)
        runners = [step.run for step in plan.steps if isinstance(step.run, PartitionRunner)]
        self._is_backward = any(runner.is_backward for runner in runners)
        self._stats = runners[0].stats if runners else CallStats()
        self._visible = sorted(plan.visible)
        self._tell_uses()
        torch_private.mark_boxed(self)

    def _tell_uses(self) -> None:
        """Tell runners who gets what of their outputs."""
        plan = self.plan
        read = {slot for step in plan.steps for slot in step.inputs}
        read.update(s for position, s in enumerate(plan.outputs) if position not in plan.visible)
        visible = {plan.outputs[position] for position in plan.visible}
        for step in plan.steps:
            if isinstance(step.run, PartitionRunner):
                step.run.uses = [(slot in visible, slot in read) for slot in step.outputs]
                made = zip(step.made, step.outputs, strict=False)
                lines = {each.partition(" at ")[2] for each, slot in made if slot in visible}
                step.run.returned_at = lines.pop() or None if len(lines) == 1 else None

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run every step.

        Returns:
            The graph's outputs. **Lifetime:** they may lie in the pool, where no replay overwrites them while they are
            held.
        """
        with self._lock:
            owner = self.owner
            self.tally.calls += 1
            try:
                if owner is not None:
                    owner.enter_call(is_backward=self._is_backward)
                slots = args + self._template
                args.clear()
                steps = self._steps if not _profiler._is_profiler_enabled else self._named_steps()
                for run, take, drops, places, num_outputs in steps:
                    inputs = take(slots)
                    for where, nothing in drops:
                        slots[where] = nothing
                    outputs, _ = run(inputs)
                    if len(outputs) != num_outputs:
                        text = f"{num_outputs} outputs expected, got {len(outputs)}"
                        raise ValueError(text)  # noqa: TRY301
                    for where, part in places:
                        slots[where] = outputs[part]
                    del inputs, outputs
                results = self._take_outputs(slots)
                if owner is not None and owner.copies_results and not owner.bypassed:
                    self._copy_out(results, owner)
            except BaseException:
                mend(open_modes)
                raise
            return results

    def _copy_out(self, results: list[Any], owner: Owner) -> None:
        """Put copies in the place of results in the pool, in a frame of its own.

        Note [Comprehensions in a with block]
            Python 3.12 runs a comprehension in the frame that it stands in, and no handler covers the step back if its
            condition is false. Ctrl-C there leaves a `with` block without its `__exit__`: a lock stays locked.
        """
        visible = [n for n in self._visible if isinstance(results[n], torch.Tensor)]
        dense = [n for n in visible if results[n].layout is torch.strided]
        own = [n for n in dense if owner.is_pool_storage(results[n])]
        self._stats.copied_bytes += fast.copy_out(results, own)

    def wrap(self, wrap: Callable[[Step, Run], Run], until: contextlib.ExitStack) -> None:
        """Have steps run by what `wrap` makes of what runs them, until a stack is closed."""
        mine = weakref.ref(self)

        def end() -> None:
            executor = mine()
            if executor is not None and wrap in executor._wraps:
                executor._make_steps([each for each in executor._wraps if each != wrap])

        for _ in range(2):  # a signal may come inside of one
            until.callback(end)
        self._make_steps([*self._wraps, wrap])

    def _make_steps(self, wraps: Sequence[Callable[[Step, Run], Run]]) -> None:
        made: list[tuple[Any, ...]] = []
        for step in self.plan.steps:
            run = step.run.run if isinstance(step.run, PartitionRunner) else _plainly(step.run)
            for wrap in wraps:
                run = wrap(step, run)
            drops = [(where, (None,) * len(step.drops[part])) for where, part in _runs(step.drops)]
            outputs = _runs(step.outputs), len(step.outputs)
            made.append((run, taker(step.inputs), drops, *outputs))
        self._wraps, self._steps = wraps, made

    def _named_steps(self) -> list[tuple[Any, ...]]:
        """The steps, with partitions as ranges of the profile that is being made."""
        return [
            (step[0] if name is None else ranged(step[0], name), *step[1:])
            for step, name in zip(self._steps, self._names, strict=True)
        ]
