"""A CUDA graph whose checkpoints recompute with their forward's random numbers."""

import contextlib
from typing import Any, Self

import torch

from cgpass.errors import DriverUnavailableError
from cgpass.recompute.states import CheckpointStates
from cgpass.recompute.tracker import RNGStatesTracker


class CheckpointedGraph(torch.cuda.CUDAGraph):
    """A `torch.cuda.CUDAGraph` for code with `cgpass.checkpoint` and random operators in it.

        graph = cgpass.CheckpointedGraph()
        with graph.warm_up():           # once at least, on a side stream as for any graph
            step()
        with torch.cuda.graph(graph):
            step()
        graph.replay()

    `step` runs forward and backward. A replay draws what eager would draw next, recomputations draw what their
    forward drew, and the generators end where eager leaves them. A graph without random operators inside a
    checkpoint needs none of this.
    """

    def __new__(
        cls, keep_graph: bool = False, *, rng_tracker: RNGStatesTracker | None = None
    ) -> Self:
        """See `__init__`."""
        del rng_tracker
        if not torch.cuda.is_available():
            raise DriverUnavailableError(
                "cgpass.CheckpointedGraph is a CUDA graph, but torch finds no CUDA device; run the step without a graph, "
                "or in a function compiled with driver='simulated'"
            )
        return super().__new__(cls, keep_graph)

    def __init__(
        self, keep_graph: bool = False, *, rng_tracker: RNGStatesTracker | None = None
    ) -> None:
        """A graph on the current device.

        Args:
            keep_graph: As for `torch.cuda.CUDAGraph`.
            rng_tracker: Whose states the captured code draws from, in or outside of checkpoints.

        Raises:
            DriverUnavailableError: There is no CUDA device.
        """
        make: Any = super().__init__  # the C++ class's, which has no stub
        make(keep_graph)
        self._states = CheckpointStates(rng_tracker=rng_tracker)
        self._capture = contextlib.ExitStack()
        self._begun: torch.Event | None = None
        """What replays wait for: torch writes where random numbers begin on the stream of the capture, too."""

    def warm_up(self) -> contextlib.AbstractContextManager[Any]:
        """A block that runs, plainly, the code that will be captured, its backward included."""
        return self._states

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.cuda.CUDAGraph.capture_begin`; `torch.cuda.graph` calls it."""
        self._states.register(self)
        super().capture_begin(*args, **kwargs)
        self._capture.enter_context(self._states)

    def capture_end(self) -> None:
        """See `torch.cuda.CUDAGraph.capture_end`; `torch.cuda.graph` calls it."""
        self._capture.close()
        super().capture_end()
        self._begun = torch.cuda.current_stream().record_event()

    def replay(self) -> None:
        """Replay, recomputations with the numbers that this replay's forward draws. No synchronisation."""
        if self._begun is not None:
            torch.cuda.current_stream().wait_event(self._begun)
            self._begun = None if self._begun.query() else self._begun
        self._states.rewind(self._states.position())
        super().replay()
