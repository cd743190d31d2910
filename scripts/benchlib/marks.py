"""Marks on the way of a step through cgpass: which place it came to, and when.

Nobody is told of them while nothing is measured: classes and globals are patched, and put back.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._dynamo.eval_frame import skip_code

from cgpass.compile.training import TrainingCall
from cgpass.runtime.executor import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgpass.runtime.executor import Run, Step
    from cgpass.runtime.recording import Recording

Mark = tuple[str, float]
"""Where, and `time.perf_counter()`."""

CALL, RETURN = "call", "return"
"""Around what Dynamo calls for a graph of its, and around what our node calls for a backward."""
ENTER, LEAVE = "enter", "leave"
"""Around an executor: all partitions of a graph."""
STEP, STEPPED = "step", "stepped"
"""Around a partition, captured or not."""
REPLAY, LAUNCHED = "replay", "launched"
BACKWARD, END = "backward", "end"
"""A loss's `backward()` is called; the step is over."""


class Marker:
    """Takes marks between `start` and `stop`."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._patches = contextlib.ExitStack()
        self._executors: set[Executor] = set()
        self._recordings: set[Recording] = set()

    def start(self) -> None:
        """Patches what is to be marked; partitions and recordings as soon as they are met for the first time."""
        self._patch(Executor, "__call__", self._entering())
        self._patch(TrainingCall, "run_backward", self._around(TrainingCall.run_backward))
        self._patch(torch.Tensor, "backward", self._beginning(torch.Tensor.backward))
        for names, name in compiled_functions():
            self._patches.callback(put_back, names, name, names[name])
            names[name] = self._around(names[name])

    def stop(self) -> None:
        """Puts everything back."""
        self._patches.close()

    def _patch(self, place: Any, name: str, value: Any) -> None:
        self._patches.enter_context(mock.patch.object(place, name, value))

    def _around(
        self, fn: Callable[..., Any], before: str = CALL, after: str = RETURN
    ) -> Callable[..., Any]:
        marks, now = self.marks, time.perf_counter

        def marked(*args: Any) -> Any:
            marks.append((before, now()))
            result = fn(*args)
            marks.append((after, now()))
            return result

        skip_code(marked.__code__)  # Dynamo would trace it: it calls what Dynamo compiled
        return marked

    def _beginning(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self.marks.append((BACKWARD, time.perf_counter()))
            return fn(*args, **kwargs)

        return marked

    def _entering(self) -> Callable[..., Any]:
        call = self._around(Executor.__call__, ENTER, LEAVE)

        def entering(executor: Executor, args: list[Any]) -> Any:
            if executor not in self._executors:
                self._executors.add(executor)
                self._patches.callback(executor.wrap(self._stepping))
            return call(executor, args)

        return entering

    def _stepping(self, step: Step, run: Run) -> Run:
        marks, now, known = self.marks, time.perf_counter, self._recordings

        def stepping(inputs: list[Any]) -> Any:
            marks.append((STEP, now()))
            outputs, recording = run(inputs)
            marks.append((STEPPED, now()))
            if recording is not None and recording not in known:
                known.add(recording)
                self._patch(recording, "replay", self._around(recording.replay, REPLAY, LAUNCHED))
            return outputs, recording

        return stepping


def compiled_functions() -> Iterator[tuple[dict[str, Any], str]]:
    """What Dynamo's bytecode calls for the graphs that it found: the globals that hold it, and its name there."""
    seen = set()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and id(names) not in seen:
            seen.add(id(names))
            yield from ((names, name) for name in list(names) if name.startswith("__compiled_fn_"))


def put_back(names: dict[str, Any], name: str, value: Any) -> None:
    """Has a global be what it was, unless Dynamo took it away meanwhile."""
    if name in names:
        names[name] = value


@contextlib.contextmanager
def taken() -> Iterator[list[Mark]]:
    """The marks of what runs inside; whoever reads the list empties it."""
    marker = Marker()
    try:
        marker.start()
        yield marker.marks
    finally:
        marker.stop()
