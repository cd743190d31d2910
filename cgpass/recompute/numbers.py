"""The random numbers of a forward, drawn again by its recomputation."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from cgpass.recompute.forbid import CAPTURE_ENDED, NOT_WARMED_UP, ForbidRandom
from cgpass.recompute.generators import default_generator, get_state, is_capturing, set_state
from cgpass.recompute.states import Run, current_run, within
from cgpass.recompute.tracker import RNGStatesTracker, forking


class Numbers(Protocol):
    """What a checkpoint remembers of the random number states."""

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """Around the forward."""
        ...

    def replayed(self) -> contextlib.AbstractContextManager[object]:
        """Around a recomputation: draws what the forward drew, and leaves every state as it was."""
        ...


def remember(devices: tuple[torch.device, ...], tracker: RNGStatesTracker | None) -> Numbers:
    """What it takes to draw again what is drawn from now on.

    Args:
        devices: Beside the CPU.
        tracker: Whose states count too; None in a warm-up or a capture: the one in whose `fork` this is, or the graph's.
    """
    run = current_run()
    if run is not None:
        forked = forking()
        if forked is not None and forked.device == run.device:
            run.check(forked, forked=True)
        tracker = tracker or run.tracker
    if not is_capturing():
        return PlainNumbers(devices, tracker, run)
    return UnknownNumbers() if run is None else CapturedNumbers(tracker, run)


class PlainNumbers:
    """States as values. Reading and setting them is work for the host only."""

    def __init__(
        self,
        devices: tuple[torch.device, ...],
        tracker: RNGStatesTracker | None = None,
        run: Run | None = None,
    ) -> None:
        """Args: devices, tracker: whose states count; run: the warm-up that this belongs to."""
        if tracker is not None:
            devices = tuple(dict.fromkeys((*devices, tracker.device)))
        generators = dict.fromkeys(map(default_generator, (torch.device("cpu"), *devices)))
        self._states = [(g, get_state(g)) for g in generators]
        self._tracker = tracker
        self._named = {} if tracker is None else tracker.get_states()
        self._current = None if tracker is None else tracker.current
        self._run = run
        self._starts = {} if run is None else run.begin_plain(tracker)

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """See `Numbers.forward`."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """See `Numbers.replayed`."""
        if is_capturing():
            with ForbidRandom(CAPTURE_ENDED):
                yield
            return
        if self._run is not None:
            self._run.recompute_plain(self._starts)
        with within(self._run), self.restored():
            yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The states as they were for a block, then as they are now."""
        with contextlib.ExitStack() as stack:
            for generator, _ in self._states:
                stack.callback(set_state, generator, get_state(generator))
            if self._tracker is not None:
                stack.enter_context(self._tracker.rewound(self._named, self._current))
            for generator, state in self._states:
                set_state(generator, state)
            yield


class CapturedNumbers:
    """States as handles, for a forward that is being captured: see Note [Random numbers of recomputations in graphs]."""

    def __init__(self, tracker: RNGStatesTracker | None, run: Run) -> None:
        """Args: tracker: whose states count; run: the capture that this belongs to."""
        self._host = PlainNumbers(())
        self._tracker = tracker
        self._current = None if tracker is None else tracker.current
        self._run = run
        self._starts = run.begin_captured(tracker)

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """See `Numbers.forward`."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """See `Numbers.replayed`. Also exact if it stops early: the states are set anew before each replay."""
        if not is_capturing():
            with ForbidRandom(CAPTURE_ENDED):
                yield
            return
        spares = self._run.recompute_captured(self._starts)
        default = default_generator(self._run.device)
        before = default.graphsafe_get_state()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._host.restored())
            stack.callback(default.graphsafe_set_state, before)
            default.graphsafe_set_state(spares[self._current])
            if self._tracker is not None:
                named = {name: spares[name] for name in self._tracker.generators}
                stack.enter_context(self._tracker.replaced(named, self._current))
            stack.enter_context(within(self._run))
            yield


class UnknownNumbers:
    """For a forward that is captured where no states were made for it: works as long as nothing random runs."""

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """See `Numbers.forward`."""
        return ForbidRandom(NOT_WARMED_UP)

    def replayed(self) -> contextlib.AbstractContextManager[object]:
        """See `Numbers.replayed`."""
        return ForbidRandom(NOT_WARMED_UP)
