"""`verify`: replays that are compared, bit by bit, with the same kernels without a graph."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from cgpass import telemetry, torch_private
from cgpass.errors import OptionError, VerificationError
from cgpass.runtime.executor import Executor, Run, Step
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.rng import put_on_the_device
from cgpass.runtime.writes import has_place

log = logging.getLogger(__name__)

_NOT: Final = "cgpass.verify: %s: %s: not verified"
_DRAWN: Final = "the state of generator {} (random numbers were not drawn as without a graph)"


class verify(contextlib.ExitStack):  # noqa: N801  called as the functions beside it are
    """Check replays against runs without a graph, from now on until `close()`, or for a `with` block.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4).eval(), backend="cgpass")
        >>> with torch.no_grad(), cgpass.verify(every=2) as checks:
        ...     results = [compiled(torch.randn(2, 4)) for _ in range(5)]
        >>> checks.checked
        2

    Every n-th call of each captured partition also runs without a graph, on copies of the inputs and with the same
    random numbers. Its results and written inputs are compared bit by bit, which waits for the device. A warning names
    partitions that can't be compared: those that communicate, and those whose kernels give other bits in each run
    (`torch.use_deterministic_algorithms(True)` chooses others).

    Raises:
        OptionError: `every` is not a positive integer.
        VerificationError: In a checked call: a replay gave other bits. The call had all its effects by then.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"cgpass.verify: every must be a positive int, got {every!r}")
        super().__init__()
        self.checked = 0
        """Calls of partitions that were compared."""
        self._every = every
        self._warned = functools.cache(log.warning)
        telemetry.listen(self._add, self)

    def _add(self, _: int, run: telemetry.GraphRun) -> None:
        if isinstance(executor := run.live(), Executor):
            executor.wrap(self._wrapped, self)

    def _wrapped(self, step: Step, run: Run) -> Run:
        runner, calls = step.run, itertools.count(1)
        if not isinstance(runner, PartitionRunner):
            return run
        if runner.communicates:
            log.warning(
                _NOT, runner.name, "a partition that communicates can't run once more alone"
            )
            return run

        check = functools.partial(self._check, step.made, runner, run)
        is_due = lambda: not (next(calls) % self._every or runner.owner.bypassed)  # noqa: E731
        return lambda args: check(args) if is_due() else run(args)

    def _check(
        self, made: Sequence[str], runner: PartitionRunner, run: Run, args: list[Any]
    ) -> Any:
        layout, device = runner.layout, runner.owner.driver.device
        written = sorted({*layout.mutated, *runner.written})
        generators = [value for value in args if isinstance(value, torch.Generator)]
        generators += map(torch_private.default_generator, {torch.device("cpu"), device})
        copies = _copied(args, [*written, *layout.pooled])
        inputs, before = list(args), [each.get_state() for each in generators]

        def found(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            return [*outputs, *(inputs[i] for i in written), *(g.get_state() for g in generators)]

        def set_states(states: Sequence[torch.Tensor]) -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

        def without_a_graph() -> list[Any]:
            values = _copied(copies, written)
            put_on_the_device(values, layout.seeds, device)
            inputs = list(values)
            set_states(before)
            with torch.inference_mode(False), torch.no_grad():
                return found(runner.fn(values), inputs)

        outputs, recording = run(args)
        if recording is None:
            return outputs, recording
        self.checked += 1
        made = made or ["unnamed"] * len(outputs)
        names = [f"output {n} ({name})" for n, name in enumerate(made)]
        names += [f"input {layout.infos[i].name}, which it writes," for i in written]
        names += [_DRAWN.format(n) for n in range(len(generators))]
        ours = found(outputs, inputs)
        try:
            plain = without_a_graph()
            different = next(filter(None, map(_difference, names, ours, plain)), None)
            if different and any(map(_difference, names, plain, without_a_graph())):
                self._warned(_NOT, runner.name, "runs without graphs differ among themselves")
            elif different:
                raise VerificationError(
                    f"cgpass.verify: {runner.name}: {different}. This is a fault of the capture: name the operator in "
                    "unsafe_ops, and report it."
                )
        finally:
            set_states(ours[len(ours) - len(generators) :])
        return outputs, recording


def _copied(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Inputs, with copies of all that shares memory with those at some positions."""
    touched = [args[i].untyped_storage() for i in positions if has_place(args[i])]
    clones = {storage._cdata: storage.clone() for storage in touched}
    places = [value.untyped_storage()._cdata if has_place(value) else None for value in args]
    return [
        torch_private.on_storage(clones[place], value) if place in clones else value
        for place, value in zip(places, args, strict=True)
    ]


def _difference(name: str, a: Any, b: Any) -> str | None:
    """Describe a value's difference from its value without a graph; None if the bits are the same."""
    if not isinstance(a, torch.Tensor):
        return None if a is b or a == b else f"{name} is {a!r}, and {b!r} without a graph"
    flat = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1) for t in (a, b))
    ours, plain = (each.view(torch.uint8) for each in flat)
    if not (count := int((ours != plain).any(-1).sum())):
        return None
    kind = f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return (
        f"{name} ({kind}) differs in {count} of {a.numel()} elements from its value without a graph"
    )
