"""What the pieces of a step take by themselves: a step that waits for nothing else can't be faster than their sum."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchlib.measure import synchronize
from cgpass.runtime.executor import Executor
from cgpass.runtime.runner import PartitionRunner

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


def pieces_of(arm: Arm) -> tuple[list[Call], list[Callable[[], None]]]:
    """What a step of a warmed-up arm runs: eager partitions with copies of their inputs, and replays of graphs.

    Raises:
        RuntimeError: A partition ran plainly.
    """
    eager: list[Call] = []
    replays: list[Callable[[], None]] = []

    def wrap(step: Step, run: Run) -> Run:
        if not isinstance(step.run, PartitionRunner):

            def keep(inputs: list[Any]) -> Any:
                copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
                eager.append((run, copies))
                return run(inputs)

            return keep

        def note(inputs: list[Any]) -> Any:
            outputs, recording = run(inputs)
            if recording is None:
                raise RuntimeError(f"{step.name} was not replayed: the arm is not warmed up")
            replays.append(recording.replay)
            return outputs, recording

        return note

    with followed(wrap):
        arm.step(arm.workload.batches[0])
    synchronize(arm.workload.device)
    return eager, replays


def times(arm: Arm, *, repeats: int = 9) -> dict[str, float]:
    """Milliseconds of a step's eager partitions, of its graphs and of its optimizer, each alone and waited for.

    What the graphs write is of no use afterwards, gradients among it, so gradients are dropped.
    """
    eager, replays = pieces_of(arm)

    @torch.no_grad()
    def run_eager() -> None:
        for run, inputs in eager:
            run(list(inputs))

    def replay() -> None:
        for launch in replays:
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
