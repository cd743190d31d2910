"""Runs the partitions of a graph in order: a flat list of steps over precomputed slots."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cgpass import _torch
from cgpass.runtime.fast import taker
from cgpass.runtime.outputs import CopyOut
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.runner import PartitionRunner
from cgpass.telemetry import Tally

_profiler = _torch.profiler_state


class Observer(Protocol):
    """Told of each step of a call."""

    def step(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Entered before a step of this name runs, left after it."""
        ...


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
    """What each output is, for messages: the node's name and the user's line."""


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

    def __str__(self) -> str:
        lines = [f"inputs: {_range(self.num_inputs)}"]
        if self.constants:
            lines.append(f"constants: {', '.join(str(slot) for slot, _ in self.constants)}")
        for step in self.steps:
            drops = f", drops {_slots(step.drops)}" if step.drops else ""
            lines.append(f"{step.name}: {_slots(step.inputs)} -> {_slots(step.outputs)}{drops}")
        visible = [i for i in range(len(self.outputs)) if i in self.visible]
        lines.append(f"outputs: {_slots(self.outputs)}, visible: {_slots(visible)}")
        return "\n".join(lines)


def _range(n: int) -> str:
    return "none" if n == 0 else "0" if n == 1 else f"0 to {n - 1}"


def _slots(slots: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, slots)) + ")"


class _CopyOut:
    """Outputs of one step that are copied out of the pool, and where in the graph's results they go."""

    def __init__(self, number: int, plan: Plan, runner: PartitionRunner) -> None:
        """Tell the runner who gets what of its outputs."""
        self.runner = runner
        step = plan.steps[number]
        numbers = {slot: n for n, slot in enumerate(step.outputs)}
        self._pairs = [
            (numbers[slot], position)
            for position, slot in enumerate(plan.outputs)
            if position in plan.visible and slot in numbers
        ]
        read = {slot for other in plan.steps for slot in other.inputs}
        read.update(s for position, s in enumerate(plan.outputs) if position not in plan.visible)
        runner.visible = frozenset(n for n, _ in self._pairs)
        runner.read = frozenset(n for slot, n in numbers.items() if slot in read)
        self._copied: frozenset[int] = frozenset()
        self._positions: tuple[int, ...] = ()
        self._targets: tuple[int, ...] = ()

    def run(self, recording: Recording, copies: list[Any]) -> None:
        """Copy what the runner says, as soon as it was made: nobody holds the pool's own tensors.

        Args:
            recording: What made the step's outputs.
            copies: Takes each copy under its position in the graph's results.
        """
        copied = self.runner.copied
        if copied is not self._copied:
            self._copied = copied
            pairs = [(n, target) for n, target in self._pairs if n in copied]
            self._positions = tuple(n for n, _ in pairs)
            self._targets = tuple(target for _, target in pairs)
        if self._positions:
            copied_bytes = recording.copy_out(self._positions, self._targets, copies)
            self.runner.stats.copied_bytes += copied_bytes


class _CopyRest:
    """Copies what shares memory with copied outputs: views of them that other steps return.

    Where users own all that they get, it copies whatever else lies in the pool, too: views of inputs that other
    partitions made.
    """

    def __init__(self, plan: Plan, owner: Owner) -> None:
        """Args: plan: of the steps. owner: of its runners."""
        self._owner = owner
        self._visible = tuple(sorted(plan.visible))
        slots = [(plan.outputs[position], position) for position in self._visible]
        self._inputs = [position for slot, position in slots if slot < plan.num_inputs]
        self._made: list[list[tuple[int, int]]] = []
        """Number of each visible output among its step's, and its position in the results; per step."""
        for step in plan.steps:
            numbers = {slot: n for n, slot in enumerate(step.outputs)}
            self._made.append([(numbers[slot], p) for slot, p in slots if slot in numbers])
        runners = [step.run for step in plan.steps if isinstance(step.run, PartitionRunner)]
        self._stats = runners[0].stats if runners else None
        self._owned = any(runner.owns_outputs for runner in runners)
        self._several_steps = len(plan.steps) > 1

    def run(
        self,
        results: list[Any],
        copies: list[Any] | None,
        recordings: Sequence[Recording | None],
    ) -> list[Any] | None:
        """Go through a call's results.

        Args:
            results: The graph's, as its steps made them; left alone.
            copies: Of those that were copied already, None if none was.
            recordings: What made each step's outputs, None if they were made plainly.

        Returns:
            Copies of these, of what shares memory with them, and of what else is to be copied.
        """
        owner = self._owner
        owned = self._owned or owner.several_threads
        if owner.bypassed or not (owned or (self._several_steps and copies)):
            return copies
        suspects = self._suspects(results, copies, recordings)
        if not suspects:
            return copies
        copies = copies or [None] * len(results)
        tensors = [n for n in self._visible if isinstance(results[n], torch.Tensor)]
        addresses = {n: results[n].untyped_storage().data_ptr() for n in tensors}
        copied = {addresses[n] for n in tensors if copies[n] is not None}
        left = {
            addresses[n]
            for n in suspects
            if addresses[n] in copied or (owned and owner.is_pool_storage(results[n]))
        }
        left.discard(0)  # no memory at all
        together = tuple(n for n in tensors if addresses[n] in left)
        copy_out = CopyOut(results, together, together)
        copy_out.run(copies)
        if self._stats is not None:
            self._stats.copied_bytes += copy_out.copied_bytes
        return copies

    def _suspects(
        self,
        results: list[Any],
        copies: list[Any] | None,
        recordings: Sequence[Recording | None],
    ) -> list[int]:
        """Positions of tensors that were not copied and may lie in memory that their step did not make."""
        found = list(self._inputs)
        for pairs, recording in zip(self._made, recordings, strict=True):
            if recording is None:
                found += [position for _, position in pairs]
            elif recording.aliases:
                found += [position for n, position in pairs if n in recording.aliases]
        return [
            n
            for n in found
            if isinstance(results[n], torch.Tensor) and (copies is None or copies[n] is None)
        ]


Run = Callable[[list[Any]], tuple[Sequence[Any], Recording | None]]
"""Runs a step: its outputs, and the recording that made them."""


def _within(run: Run, name: str, observer: Observer) -> Run:
    """`run`, with an observer told of it."""

    def observed(values: list[Any]) -> Any:
        with observer.step(name):
            return run(values)

    return observed


def ranged(run: Run, name: str) -> Run:
    """`run`, as a range of a profile."""

    def within(values: list[Any]) -> Any:
        with _torch.profiler_range(name):
            return run(values)

    return within


def _plainly(
    fn: Callable[[list[Any]], Sequence[Any]],
) -> Callable[[list[Any]], tuple[Sequence[Any], None]]:
    """A plain callable with a runner's results: its outputs, and no recording."""
    return lambda values: (fn(values), None)


def _runs(positions: Sequence[int]) -> list[tuple[slice, slice]]:
    """Positions as runs of consecutive ones: where each lies, and which of as many values belong there."""
    found: list[tuple[slice, slice]] = []
    for n, position in enumerate(positions):
        where, part = slice(position, position + 1), slice(n, n + 1)
        if found and found[-1][0].stop == position:
            before = found.pop()
            where, part = slice(before[0].start, where.stop), slice(before[1].start, part.stop)
        found.append((where, part))
    return found


class Executor:
    """Calls a plan's steps; boxed calling convention."""

    def __init__(
        self, plan: Plan, owner: Owner | None, names: Mapping[str, str] | None = None
    ) -> None:
        """Prepare the steps.

        Args:
            plan: What to run.
            owner: Of its runners; None if nothing is recorded.
            names: What profiles call each step, by its name; those that have none are not shown there.
        """
        self.plan = plan
        self._names = [(names or {}).get(step.name) for step in plan.steps]
        self.owner = owner
        self.tally = Tally()
        self._template: list[Any] = [None] * (plan.num_slots - plan.num_inputs)
        for slot, value in plan.constants:
            self._template[slot - plan.num_inputs] = value
        self._bare_steps: list[tuple[Any, ...]] = [
            (
                step.run.run if isinstance(step.run, PartitionRunner) else _plainly(step.run),
                taker(step.inputs),
                [(where, (None,) * len(step.drops[part])) for where, part in _runs(step.drops)],
                _runs(step.outputs),
                len(step.outputs),
                _CopyOut(number, plan, step.run) if isinstance(step.run, PartitionRunner) else None,
            )
            for number, step in enumerate(plan.steps)
        ]
        self._steps = self._bare_steps
        self._wraps: list[Callable[[Step, Run], Run]] = []
        self._take_outputs = taker(plan.outputs)
        runners = [step.run for step in plan.steps if isinstance(step.run, PartitionRunner)]
        self._is_backward = any(runner.settings.is_backward for runner in runners)
        self._copy_rest = None if owner is None else _CopyRest(plan, owner)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run every step.

        Args:
            args: The graph's inputs; the list is emptied.

        Returns:
            The graph's outputs. **Lifetime:** they may lie in the pool, where no replay overwrites them while they are
            held.
        """
        if self.owner is None:
            self.tally.calls += 1
            return self._run(args)
        with self.owner.lock:
            self.tally.calls += 1
            self.owner.enter_call(is_backward=self._is_backward)
            return self._run(args)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Have an observer told of every step inside; calls outside cost nothing for it."""
        end = self.wrap(lambda step, run: _within(run, step.name, observer))
        try:
            yield
        finally:
            end()

    def wrap(self, wrap: Callable[[Step, Run], Run]) -> Callable[[], None]:
        """Have steps run by what `wrap` makes of what runs them, until the returned function is called."""
        self._wraps.append(wrap)
        self._steps = self._with_wraps()
        mine = weakref.ref(self)

        def end() -> None:
            executor = mine()
            if executor is not None and wrap in executor._wraps:
                executor._wraps.remove(wrap)
                executor._steps = executor._with_wraps()

        return end

    def _with_wraps(self) -> list[tuple[Any, ...]]:
        if not self._wraps:
            return self._bare_steps
        steps = []
        for step, (run, *rest) in zip(self.plan.steps, self._bare_steps, strict=True):
            for wrap in self._wraps:
                run = wrap(step, run)
            steps.append((run, *rest))
        return steps

    def _named_steps(self) -> list[tuple[Any, ...]]:
        """The steps, with partitions as ranges of the profile that is being made."""
        return [
            (step[0] if name is None else ranged(step[0], name), *step[1:])
            for step, name in zip(self._steps, self._names, strict=True)
        ]

    def _run(self, args: list[Any]) -> list[Any]:
        slots = args + self._template
        args.clear()
        steps = self._steps if not _profiler._is_profiler_enabled else self._named_steps()
        copies: list[Any] | None = None
        recordings: list[Recording | None] = []
        for run, take, drops, places, num_outputs, copy_out in steps:
            inputs = take(slots)
            for where, nothing in drops:
                slots[where] = nothing
            outputs, recording = run(inputs)
            if len(outputs) != num_outputs:
                raise ValueError(f"{num_outputs} outputs expected, got {len(outputs)}")
            recordings.append(recording)
            if recording is not None and copy_out is not None and copy_out.runner.copied:
                copies = copies or [None] * len(self.plan.outputs)
                copy_out.run(recording, copies)
            for where, part in places:
                slots[where] = outputs[part]
            del inputs, outputs
        results = self._take_outputs(slots)
        if self._copy_rest is not None:
            copies = self._copy_rest.run(results, copies, recordings)
        if copies is None:
            return results
        return [
            result if copy is None else copy for result, copy in zip(results, copies, strict=True)
        ]
