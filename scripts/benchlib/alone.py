"""What the pieces of a step take by themselves: a step that waits for nothing else can't be faster than their sum."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchlib.measure import counted, synchronize
from cgpass.runtime.executor import Executor
from cgpass.runtime.partition import PartitionRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchlib.arms import Arm
    from cgpass.runtime.executor import Run, Step

Call = tuple[Any, list[Any]]


@contextlib.contextmanager
def followed(wrap: Callable[[Step, Run], Run]) -> Iterator[None]:
    """Have all steps of all executors run by what `wrap` makes of what runs them."""
    call = Executor.__call__

    def wrapped(self: Executor, args: list[Any]) -> list[Any]:
        end = self.wrap(wrap)
        try:
            return call(self, args)
        finally:
            end()

    with mock.patch.object(Executor, "__call__", wrapped):
        yield


def eager_partitions(arm: Arm) -> list[Call]:
    """What a step runs without a graph since it can't be captured, with copies of the inputs."""
    found: list[Call] = []

    def wrap(step: Step, run: Run) -> Run:
        if isinstance(step.run, PartitionRunner):
            return run

        def keep(inputs: list[Any]) -> Any:
            found.append((run, [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]))
            return run(inputs)

        return keep

    with followed(wrap):
        arm.step(arm.workload.batches[0])
    return found


def replays(arm: Arm, *, attempts: int = 40) -> list[Callable[[], None]]:
    """The replays of a step, in order: of the first one in which all that can be captured is replayed.

    Raises:
        RuntimeError: There is none. Copies of inputs take memory in whose place others lay, so there are some attempts.
    """
    for _ in range(attempts):
        found: list[Callable[[], None]] = []

        def wrap(step: Step, run: Run, found: list[Callable[[], None]] = found) -> Run:
            def note(inputs: list[Any]) -> Any:
                outputs, recording = run(inputs)
                if recording is not None:
                    found.append(recording.replay)
                return outputs, recording

            return note

        with followed(wrap), counted() as counters:
            arm.step(arm.workload.batches[0])
        others = ("warmups", "recordings", "plain_calls")
        if found and len(found) == counters["replays"] and not any(counters[n] for n in others):
            return found
    raise RuntimeError(f"not all of a step was replayed in {attempts} steps")


def times(arm: Arm, *, repeats: int = 9) -> dict[str, float]:
    """Milliseconds of a step's eager partitions, of its graphs and of its optimizer, each alone and waited for.

    What the graphs write is of no use afterwards, gradients among it, so gradients are dropped.

    Raises:
        RuntimeError: The arm is not warmed up.
    """
    eager = eager_partitions(arm)
    launches = replays(arm)  # last: whatever is recorded anew has others

    @torch.no_grad()
    def run_eager() -> None:
        for run, inputs in eager:
            run(list(inputs))

    def replay() -> None:
        for launch in launches:
            launch()

    parts = {"eager_ms": run_eager, "optimizer_ms": arm.finish, "graphs_ms": replay}
    found = {}
    for name, part in parts.items():
        taken = []
        for _ in range(repeats):
            synchronize(arm.workload.device)
            start = time.perf_counter()
            part()
            synchronize(arm.workload.device)
            taken.append((time.perf_counter() - start) * 1e3)
        found[name] = round(statistics.median(taken), 4)
    arm.optimizer.zero_grad(set_to_none=True)
    return found
