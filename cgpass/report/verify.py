"""`verify`: replays that are compared, bit by bit, with the same kernels without a graph."""

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any, Self

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

        with cgpass.verify(every=100):
            train()

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


class Verification:
    """Checks that go on; see `verify`."""

    def __init__(self, every: int) -> None:
        self.checked = 0
        """Calls of partitions that were compared."""
        self._every = every
        self._warned: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._stack.callback(telemetry.listen(self._add))
        for number, (_, runs) in telemetry.graph_runs().items():
            for run in runs:
                self._add(number, run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the checks."""
        self._stack.close()

    def _add(self, number: int, run: telemetry.GraphRun) -> None:
        if isinstance(executor := run.live(), Executor):
            name = telemetry.graph_runs()[number][0].name
            self._stack.callback(executor.wrap(functools.partial(self._wrapped, name)))

    def _wrapped(self, graph: str, step: Step, run: Run) -> Run:
        runner, calls = step.run, 0
        if not isinstance(runner, PartitionRunner):
            return run
        place = graph.replace(" of ", f" {step.name} of ", 1) if " of " in graph else step.name

        def checked(args: list[Any]) -> Any:
            nonlocal calls
            calls += 1
            if runner.communicates:
                self._warn_once(place, "what communicates can't run once more alone: not verified")
            elif calls % self._every == 0 and not runner.owner.bypassed:
                return self._check(place, step, runner, run, args)
            return run(args)

        return checked

    def _check(
        self, place: str, step: Step, runner: PartitionRunner, run: Run, args: list[Any]
    ) -> Any:
        written = sorted({*runner.layout.mutated, *runner.written})
        device = runner.owner.driver.device
        generators = [value for value in args if isinstance(value, torch.Generator)]
        devices = dict.fromkeys([torch.device("cpu"), device])
        generators += [torch_private.default_generator(each) for each in devices]

        def named(outputs: Sequence[Any], inputs: Sequence[Any]) -> dict[str, Any]:
            made = (f" ({name})" for name in step.made)
            found = {f"output {n}{next(made, '')}": value for n, value in enumerate(outputs)}
            found |= {
                f"input {runner.layout.infos[i].name}, which it writes,": inputs[i] for i in written
            }
            return found | {
                f"the state of generator {n} (random numbers were not drawn as without a graph)": g.get_state()
                for n, g in enumerate(generators)
            }

        def without_a_graph() -> dict[str, Any]:
            values = _copied(copies, written)
            put_on_the_device(values, runner.layout.seeds, device)
            inputs = list(values)
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            with torch.inference_mode(False), torch.no_grad():
                return named(runner.fn(values), inputs)

        before = [generator.get_state() for generator in generators]
        copies, inputs = _copied(args, [*written, *runner.layout.pooled]), list(args)
        result = run(args)
        if result[1] is None:
            return result
        self.checked += 1
        ours, after = named(result[0], inputs), [generator.get_state() for generator in generators]
        try:
            plain = without_a_graph()
            if (how := _difference(ours, plain)) is None:
                return result
            if _difference(plain, without_a_graph()) is None:
                raise VerificationError(
                    f"cgpass.verify: {place}: {how}. This is a fault of the capture: name the operator in unsafe_ops, and "
                    "report it."
                )
            self._warn_once(
                place, f"{how}, but runs without graphs differ among themselves, too: not verified"
            )
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
    found = list(args)
    for i, value in enumerate(args):
        if has_place(value) and (clone := clones.get(value.untyped_storage()._cdata)) is not None:
            found[i] = torch_private.on_storage(clone, value)
    return found


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
                at = int(unequal.nonzero()[0])
                index = [int(n) for n in torch.unravel_index(torch.tensor(at), a.shape)]
                kind = f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
                return (
                    f"{name} ({kind}) differs in {count} of {a.numel()} elements from what it is without a graph, first at "
                    f"{index}"
                )
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[elements, bytes of each]."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)
