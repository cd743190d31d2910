"""Generator states for recomputations inside CUDA graphs."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeAlias

import torch

from cgpass.errors import CheckpointError
from cgpass.recompute.generators import default_generator, is_capturing
from cgpass.recompute.tracker import RNGStatesTracker

# Note [Random numbers of recomputations in graphs]
#
# While a graph is captured, nobody can read or set a generator's offset. What can be done is to exchange the state
# that a generator draws from for another one, if that was registered with the graph before the capture began. So:
#
# 1. A warm-up runs the same code plainly. At every checkpoint it notes how far each state has advanced since the run
#    began, and it makes one spare state for every recomputation.
# 2. The capturer registers the spares. In the capture a forward draws from the user's own states, as eager does; a
#    recomputation draws from a spare.
# 3. Before a replay the spares are set: seed and position of the user's states as they stand when the forward's
#    replay begins, plus what the warm-up noted. Both are numbers on the host; nothing synchronises.
#
# So `torch.manual_seed` and a restored state reach the recomputations, a recomputation may stop early, and a forward
# that has no backward leaves nothing out of step, all of which a pair of states that advance in parallel can't have.

Source: TypeAlias = str | None
"""A state that numbers come from: a tracker's name, None for the device's default state."""

Position: TypeAlias = Mapping[Source, tuple[int, int]]
"""Seed and offset by source."""

_local = threading.local()


def current_run() -> "Run | None":
    """The run that this thread's checkpoints belong to."""
    return getattr(_local, "run", None)


@contextlib.contextmanager
def within(run: "Run | None") -> Iterator[None]:
    """Have this thread's checkpoints belong to a run for a block."""
    outer, _local.run = current_run(), run
    try:
        yield
    finally:
        _local.run = outer


class CheckpointStates:
    """What the checkpoints of one captured function recompute with.

    `CheckpointedGraph` does this for one graph of forward and backward. Whoever captures the two apart makes one of
    these for each recording:

        with states:                # warm-up; the backward may come later, its checkpoints know where they belong
            out = fn(*args)
        backward(out)
        states.register(forward_graph); states.register(backward_graph)     # before capture_begin
        with states:                # around the captured forward
            out = fn(*args)
        ...                         # then the captured backward; replays wait for the stream of the captures
        position = states.position(); forward_graph.replay()
        states.rewind(position); backward_graph.replay()

    See Note [Random numbers of recomputations in graphs]. For the CPU all of this does nothing: there a recorded
    recomputation moves the generators itself, by operators.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        rng_tracker: RNGStatesTracker | None = None,
    ) -> None:
        """States for one device.

        Args:
            device: The current CUDA device if None.
            rng_tracker: Whose states the captured code draws from.
        """
        found = torch.device("cuda" if device is None else device)
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        self.device = found
        self.tracker = rng_tracker
        """Whose states are registered with the graph."""
        self._spares: dict[Source, list[torch.Generator]] = {}
        self._open: list[contextlib.AbstractContextManager[None]] = []
        self.warmed: Run | None = None
        self.recorded: Run | None = None

    def __enter__(self) -> Self:
        position = {} if is_capturing() else self.position()
        base = {source: offset for source, (_, offset) in position.items()}
        scope = within(None if self.device.type == "cpu" else Run(self, base))
        scope.__enter__()
        self._open.append(scope)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.pop().__exit__(None, None, None)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """What has to be registered with a graph before its capture begins; complete after a whole warm-up."""
        named = () if self.tracker is None else self.tracker.generators.values()
        return (*named, *(spare for spares in self._spares.values() for spare in spares))

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register all of `generators` with a graph."""
        for generator in self.generators:
            graph.register_generator_state(generator)

    def position(self) -> Position:
        """Where the user's states stand; read before the forward's replay. On the host, no synchronisation."""
        if self.device.type == "cpu":
            return {}
        return {
            source: (generator.initial_seed(), generator.get_offset())
            for source, generator in self._sources().items()
        }

    def rewind(self, position: Position) -> None:
        """Set what the recomputations draw from to where their forward stood; before the backward's replay.

        Args:
            position: From before that forward's replay.
        """
        if self.recorded is None:
            return
        for spare, source, start in self.recorded.taken:
            seed, offset = position[source]
            spare.manual_seed(seed)
            spare.set_offset(offset + start)

    def _sources(self) -> dict[Source, torch.Generator]:
        if self.tracker is None:
            return {None: default_generator(self.device)}
        return {None: self.tracker.default_state(), **self.tracker.generators}

    def spare(self, source: Source, index: int, *, make: bool) -> torch.Generator:
        """A state that a run hasn't taken yet."""
        spares = self._spares.setdefault(source, [])
        if index == len(spares) and make:
            spares.append(default_generator(self.device).clone_state())
        if index >= len(spares):
            raise CheckpointError(
                f"cgpass.checkpoint: recomputation {index} of this capture has no generator state to draw from; the "
                f"warm-up recomputed {len(spares)} times. Warm up with the same code, backward included, as is captured."
            )
        return spares[index]

    def check(self, tracker: RNGStatesTracker | None, *, forked: bool = False) -> None:
        """Raise unless a checkpoint's tracker is the one whose states get registered.

        Args:
            tracker: The checkpoint's own; None if it has none.
            forked: Whether it is, instead, the one in whose `fork` the checkpoint is.
        """
        if tracker is None or tracker is self.tracker:
            return
        which = "this checkpoint's rng_tracker"
        if forked:
            which = f"the tracker in whose fork({tracker.current!r}) this checkpoint is"
        has = "none" if self.tracker is None else f"another one, of {_states_of(self.tracker)}"
        raise CheckpointError(
            f"cgpass.checkpoint: {which} ({_states_of(tracker)}) is not the one whose states are registered with the "
            f"graph, which has {has}. Pass that tracker as CheckpointedGraph(rng_tracker=...) or "
            f"GraphedOptions(rng_tracker=...){', or leave its fork before the checkpoint' * forked}; a graph takes one."
        )


def _states_of(tracker: RNGStatesTracker) -> str:
    """What tells a tracker from others."""
    names = ", ".join(map(repr, tracker.generators))
    return f"states {names}" if names else "no states"


class Run:
    """One run of the code, as warm-up or captured: its checkpoints in order."""

    def __init__(self, states: CheckpointStates, base: Mapping[Source, int]) -> None:
        """Args: states: that it is a run of; base: offsets where it begins, empty if nobody can tell."""
        self._states = states
        self._base = base
        self._starts: list[dict[Source, int]] = []
        self._counts: dict[Source, int] = {}
        self.taken: list[tuple[torch.Generator, Source, int]] = []

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self._states.device

    @property
    def tracker(self) -> RNGStatesTracker | None:
        """Whose states are registered with the graph."""
        return self._states.tracker

    def check(self, tracker: RNGStatesTracker | None, *, forked: bool = False) -> None:
        """Raise unless a tracker's states are registered with the graph. See `CheckpointStates.check`."""
        self._states.check(tracker, forked=forked)

    def begin_plain(self, tracker: RNGStatesTracker | None) -> dict[Source, int]:
        """Note a checkpoint of a warm-up: how far each state it may draw from has advanced in this run."""
        self.check(tracker)
        self._states.warmed = self
        default = default_generator(self.device).get_offset()
        named: Mapping[str, Any] = {} if tracker is None else tracker.generators
        offsets: dict[Source, int] = {name: g.get_offset() for name, g in named.items()}
        offsets[None if tracker is None else tracker.current] = default
        new = [source for source in offsets if source not in self._base]
        if new:
            raise CheckpointError(
                f"cgpass.checkpoint: the state {new[0]!r} was added to the rng_tracker during the warm-up. Add all "
                f"states before the warm-up begins."
            )
        starts = {source: offset - self._base[source] for source, offset in offsets.items()}
        self._starts.append(starts)
        return starts

    def begin_captured(self, tracker: RNGStatesTracker | None) -> dict[Source, int]:
        """Note a checkpoint in a capture; returns what the warm-up noted at the same one."""
        self.check(tracker)
        self._states.recorded = self
        warmed = self._states.warmed
        known = [] if warmed is None else warmed._starts
        index = len(self._starts)
        if index >= len(known):
            raise CheckpointError(
                f"cgpass.checkpoint: checkpoint {index} of this capture was not seen in the warm-up, which had "
                f"{len(known)}. Warm up with the same code as is captured, `with graph.warm_up():`."
            )
        self._starts.append(known[index])
        return known[index]

    def recompute_plain(self, starts: Mapping[Source, int]) -> None:
        """Make the spare states that this recomputation needs once it is captured."""
        for source in starts:
            self._states.spare(source, self._next(source), make=True)

    def recompute_captured(self, starts: Mapping[Source, int]) -> dict[Source, torch.Generator]:
        """The states that a captured recomputation draws from instead of `starts`' sources."""
        spares = {}
        for source, start in starts.items():
            spares[source] = self._states.spare(source, self._next(source), make=False)
            self.taken.append((spares[source], source, start))
        return spares

    def _next(self, source: Source) -> int:
        index = self._counts.get(source, 0)
        self._counts[source] = index + 1
        return index
