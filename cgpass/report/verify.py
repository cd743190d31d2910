"""`verify`: replays that are compared, bit by bit, with the same kernels without a graph."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from cgpass import telemetry, torch_private
from cgpass.errors import OptionError, VerificationError
from cgpass.runtime.executor import Executor, Run, Step
from cgpass.runtime.partition import PartitionRunner
from cgpass.runtime.rng import put_on_the_device
from cgpass.runtime.writes import has_place

log = logging.getLogger(__name__)


def verify(every: int = 1) -> "Verification":
    """Check replays against runs without a graph, from now on or for a `with` block.

    Example:
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
        self._warned: set[str] = set()
        self.callback(telemetry.listen(self._add))
        for number, (_, runs) in telemetry.graph_runs().items():
            for run in runs:
                self._add(number, run)

    def _add(self, number: int, run: telemetry.GraphRun) -> None:
        if isinstance(executor := run.live(), Executor):
            name = telemetry.graph_runs()[number][0].name
            self.callback(executor.wrap(functools.partial(self._wrapped, name)))

    def _wrapped(self, graph: str, step: Step, run: Run) -> Run:
        runner, calls = step.run, itertools.count(1)
        if not isinstance(runner, PartitionRunner):
            return run
        place = graph.replace(" of ", f" {step.name} of ", 1) if " of " in graph else step.name

        def checked(args: list[Any]) -> Any:
            if next(calls) % self._every or runner.owner.bypassed:
                return run(args)
            if runner.communicates:
                self._warn_once(place, "what communicates can't run once more alone: not verified")
                return run(args)
            return self._check(place, step, runner, run, args)

        return checked

    def _check(
        self, place: str, step: Step, runner: PartitionRunner, run: Run, args: list[Any]
    ) -> Any:
        layout, device = runner.layout, runner.owner.driver.device
        written = sorted({*layout.mutated, *runner.written})
        generators = [value for value in args if isinstance(value, torch.Generator)]
        generators += map(torch_private.default_generator, {torch.device("cpu"), device})

        def states() -> list[torch.Tensor]:
            return [generator.get_state() for generator in generators]

        def named(outputs: Sequence[Any], inputs: Sequence[Any]) -> dict[str, Any]:
            made = (f" ({name})" for name in step.made)
            found = {f"output {n}{next(made, '')}": value for n, value in enumerate(outputs)}
            found |= {f"input {layout.infos[i].name}, which it writes,": inputs[i] for i in written}
            drawn = "the state of generator {} (random numbers were not drawn as without a graph)"
            return found | {drawn.format(n): state for n, state in enumerate(states())}

        def without_a_graph() -> dict[str, Any]:
            values = _copied(copies, written)
            put_on_the_device(values, layout.seeds, device)
            inputs = list(values)
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            with torch.inference_mode(False), torch.no_grad():
                return named(runner.fn(values), inputs)

        before, copies, inputs = states(), _copied(args, [*written, *layout.pooled]), list(args)
        result = run(args)
        if result[1] is None:
            return result
        self.checked += 1
        ours, after = named(result[0], inputs), states()
        try:
            plain = without_a_graph()
            if how := _difference(ours, plain):
                if not _difference(plain, without_a_graph()):
                    raise VerificationError(
                        f"cgpass.verify: {place}: {how}. This is a fault of the capture: name the operator in unsafe_ops, "
                        "and report it."
                    )
                why = "but runs without graphs differ among themselves, too: not verified"
                self._warn_once(place, f"{how}, {why}")
        finally:
            for generator, state in zip(generators, after, strict=True):
                generator.set_state(state)
        return result

    def _warn_once(self, place: str, why: str) -> None:
        if place not in self._warned:
            self._warned.add(place)
            log.warning("cgpass.verify: %s: %s", place, why)


def _copied(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Inputs, with copies of all that shares memory with those at some positions."""
    touched = [args[i].untyped_storage() for i in positions if has_place(args[i])]
    clones = {storage._cdata: storage.clone() for storage in touched}
    places = [value.untyped_storage()._cdata if has_place(value) else None for value in args]
    return [
        torch_private.on_storage(clones[place], value) if place in clones else value
        for place, value in zip(places, args, strict=True)
    ]


def _difference(ours: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """The first value that differs, and how; None if all are the same bit by bit."""
    for name, a in ours.items():
        b = plain[name]
        if not isinstance(a, torch.Tensor):
            if a is not b and a != b:
                return f"{name} is {a!r}, and {b!r} without a graph"
        elif not (a.is_sparse or a.is_nested or not a.numel()):
            unequal = (_bits(a) != _bits(b)).any(dim=-1)
            if count := int(unequal.sum()):
                index = [int(n) for n in torch.unravel_index(unequal.nonzero()[0, 0], a.shape)]
                kind = f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
                return f"{name} ({kind}) differs in {count} of {a.numel()} elements from what it is without a graph, first at {index}"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[elements, bytes of each]."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)
