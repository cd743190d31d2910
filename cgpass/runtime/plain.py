"""`PlainGraph`: a graph that runs without CUDA graphs, and what is counted and measured of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.executor import Observer
from cgpass.telemetry import Tally


class PlainGraph:
    """Calls a whole graph that nothing is captured of."""

    owner = None
    """As of an `Executor` that records nothing."""

    def __init__(self, fn: BoxedCallable) -> None:
        """Args: fn: the compiled graph."""
        self.tally = Tally()
        self._fn = fn

    def __call__(self, args: list[Any]) -> Any:
        """Run it; the list is emptied."""
        self.tally.calls += 1
        return self._fn(args)

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """As `Executor.observed`, with one step that has no name."""
        fn = self._fn

        def run(args: list[Any]) -> Any:
            with observer.step(""):
                return fn(args)

        self._fn = run
        try:
            yield
        finally:
            self._fn = fn
