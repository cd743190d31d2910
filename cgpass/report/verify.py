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

_ALONE: Final = "cgpass.verify: %s: what communicates can't run once more alone: not verified"
_NOISE: Final = "cgpass.verify: %s: runs without graphs differ among themselves: not verified"


def verify(every: int = 1) -> "Verification":
    """Check replays against runs without a graph, from now on or for a `with` block.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(4, 4).eval(), backend="cgpass")
        >>> with torch.no_grad(), cgpass.verify(every=2) as checks:
        ...     results = [compiled(torch.randn(2, 4)) for _ in range(5)]
        >>> checks.checked
        2

    Of each captured partition every n-th call also runs without a graph, on copies of the inputs and with the random
    numbers that the replay drew; what it returns and writes is compared bit by bit. That waits for the device.
    Partitions that communicate are left out, and kernels that give other bits in each run can't be compared: a warning
    names them. `torch.use_deterministic_algorithms(True)` chooses others.

    Returns:
        What counts the checks and ends them: `checked`, `close()`. **Lifetime:** checks go on until it is closed.

    Raises:
        OptionError: `every` is no positive integer.
        VerificationError: In a call that is checked: a replay gave other bits. The call had all its effects by then.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise OptionError(f"cgpass.verify: every must be a positive int, got {every!r}")
    return Verification(every)


class Verification(contextlib.ExitStack):
    """Checks that go on until `close()`, or to the end of a block; see `verify`."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.checked = 0
        """Calls of partitions that were compared."""
        self._every = every
        self._warned = functools.cache(log.warning)
        self.callback(telemetry.listen(self._add))

    def _add(self, _: int, run: telemetry.GraphRun) -> None:
        if isinstance(executor := run.live(), Executor):
            self.callback(executor.wrap(self._wrapped))

    def _wrapped(self, step: Step, run: Run) -> Run:
        runner, calls = step.run, itertools.count(1)
        if not isinstance(runner, PartitionRunner):
            return run

        def checked(args: list[Any]) -> Any:
            if next(calls) % self._every or runner.owner.bypassed:
                return run(args)
            if runner.communicates:
                self._warned(_ALONE, runner.name)
                return run(args)
            return self._check(step.made, runner, run, args)

        return checked

    def _check(
        self, made: Sequence[str], runner: PartitionRunner, run: Run, args: list[Any]
    ) -> Any:
        layout, device = runner.layout, runner.owner.driver.device
        written = sorted({*layout.mutated, *runner.written})
        generators = [value for value in args if isinstance(value, torch.Generator)]
        generators += map(torch_private.default_generator, {torch.device("cpu"), device})

        def found(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            return [*outputs, *(inputs[i] for i in written), *(g.get_state() for g in generators)]

        def without_a_graph() -> list[Any]:
            values = _copied(copies, written)
            put_on_the_device(values, layout.seeds, device)
            inputs = list(values)
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            with torch.inference_mode(False), torch.no_grad():
                return found(runner.fn(values), inputs)

        before, inputs = [generator.get_state() for generator in generators], list(args)
        copies = _copied(args, [*written, *layout.pooled])
        result = run(args)
        if result[1] is None:
            return result
        self.checked += 1
        ours = found(result[0], inputs)
        given = dict(enumerate(made))
        names = [f"output {n} ({given.get(n, 'unnamed')})" for n in range(len(result[0]))]
        names += [f"input {layout.infos[i].name}, which it writes," for i in written]
        drawn = "the state of generator {} (random numbers were not drawn as without a graph)"
        names += map(drawn.format, range(len(generators)))
        try:
            plain = without_a_graph()
            different = next(filter(None, map(_difference, names, ours, plain)), None)
            if different and any(map(_difference, names, plain, without_a_graph())):
                self._warned(_NOISE, runner.name)
            elif different:
                raise VerificationError(
                    f"cgpass.verify: {runner.name}: {different}. This is a fault of the capture: name the operator in "
                    "unsafe_ops, and report it."
                )
        finally:
            for generator, state in zip(reversed(generators), reversed(ours), strict=False):
                generator.set_state(state)
        return result


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
    """How a value differs from what it is without a graph; None if it is the same bit by bit."""
    if not isinstance(a, torch.Tensor):
        return None if a is b or a == b else f"{name} is {a!r}, and {b!r} without a graph"
    if a.is_sparse or a.is_nested or not a.numel():
        return None
    unequal = (_bits(a) != _bits(b)).any(dim=-1)
    if not (count := int(unequal.sum())):
        return None
    first = [int(n) for n in torch.unravel_index(unequal.nonzero()[0, 0], a.shape)]
    kind = f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
    return f"{name} ({kind}) differs in {count} of {a.numel()} elements from what it is without a graph, first at {first}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[elements, bytes of each]."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)
