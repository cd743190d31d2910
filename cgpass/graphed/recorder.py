"""`GroupRecorder`: warms up and records all callables, in the order of their schedule."""

from typing import TYPE_CHECKING, Any

from cgpass.graphed.capture import Capture
from cgpass.graphed.group import Group
from cgpass.graphed.hooks import HookSet
from cgpass.graphed.passes import Pass
from cgpass.graphed.recorded import RecordedPass
from cgpass.graphed.schedule import Schedule
from cgpass.graphed.values import InputMemory, own_memory, sample_memory
from cgpass.runtime.inputs import layout_of

if TYPE_CHECKING:
    from cgpass.runtime.recording import Recording


class GroupRecorder:
    """One pass after another.

    Note [Memory that microbatches share]
        With `reuse_buffers`, what a forward and its backward hold alone is handed on when the order shows them to be
        over: arguments' memory to a later forward with arguments laid out alike, outputs back to the pool, gradients
        too, but one backward later, since the next one may read them. Whoever holds one of them over the replay that
        reuses its memory keeps its value: it is moved. Samples are the user's: arguments have memory of our own then.
    """

    def __init__(self, group: Group, schedule: Schedule, passes: list[Pass]) -> None:
        """Args: passes: one per forward of the schedule."""
        self._group = group
        self._schedule = schedule
        self._passes = passes
        self._reuse = passes[0].options.reuse_buffers
        self._states = [each.new_states(group.device) for each in passes]
        self._taken: set[int] = set()
        """Storages that are some argument's memory, or a parameter's."""
        self._free: dict[Any, list[InputMemory]] = {}
        self._last_backward: Recording | None = None

    def warm_up(self, once: HookSet) -> None:
        """Run every forward, with its backward, as often as asked for."""
        once.run("pre_warmup")
        for number in self._schedule.forwards:
            each = self._passes[number]
            each.warmup_hooks.run("pre_warmup", each.hooked)
            iterations = each.options.num_warmup_iters
            each.warm_up(self._group, self._states[number], iterations, pool=True)
            each.warmup_hooks.run("post_warmup", each.hooked)
        once.run("post_warmup")

    def record(self) -> list[RecordedPass]:
        """Record every forward and backward; returns one for each forward."""
        for each in self._passes:
            for tensor in each.statics.now():
                self._taken.add(tensor.untyped_storage().data_ptr())
        captures: dict[int, Capture] = {}
        recorded: dict[int, RecordedPass] = {}
        for step in self._schedule.steps:
            number = step.number
            if step.forward:
                capture = self._new_capture(number)
                captures[number] = capture
                capture.capture_forward()
            else:
                capture = captures.pop(number)
                capture.capture_backward()
                recorded[number] = capture.finish()
                if self._reuse:
                    self._hand_on(capture)
        return [recorded[number] for number in range(len(self._passes))]

    def _new_capture(self, number: int) -> Capture:
        each = self._passes[number]
        memory = [
            self._memory(sample, written=i in each.written_inputs)
            for i, sample in enumerate(each.binding.samples)
        ]
        return Capture(each, self._group, self._states[number], 0, memory)

    def _memory(self, sample: Any, *, written: bool) -> InputMemory:
        free = self._free.get(layout_of(sample))
        if free:
            memory = free.pop()
            memory.fill(sample)
            return memory
        storage = sample.untyped_storage().data_ptr()
        memory = None
        if storage not in self._taken and not written and not self._reuse:
            memory = sample_memory(sample)
        self._taken.add(storage)
        return own_memory(sample) if memory is None else memory

    def _hand_on(self, capture: Capture) -> None:
        """See Note [Memory that microbatches share]."""
        for i, memory in enumerate(capture.memory):
            if i not in capture.description.written_inputs:
                self._free.setdefault(layout_of(memory.tensor), []).append(memory)
        assert capture.forward is not None
        capture.forward.memory.release_unheld()
        # Nobody moves gradients that are not the user's own.
        if self._last_backward is not None and self._group.own_grads:
            self._last_backward.memory.release_unheld()
        self._last_backward = capture.backward
