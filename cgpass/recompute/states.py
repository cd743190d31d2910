"""The random numbers of a forward, drawn again by its recomputations, inside of CUDA graphs and outside."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self, TypeAlias

import torch

from cgpass import torch_private
from cgpass.compile.facts.values import draws
from cgpass.errors import CheckpointError, DriverUnavailableError
from cgpass.recompute.tracker import (
    RNGStatesTracker,
    default_generator,
    forking,
    get_state,
    set_state,
)

# Note [Random numbers of recomputations in graphs]
#
# While a graph is captured, nobody can read or set a generator's offset. What can be done is to exchange the state
# that a generator draws from for another one, if that was registered with the graph before the capture began. So:
#
# 1. A warm-up runs the same code without a graph. At every checkpoint it notes how far each state has advanced since the run
#    began, and it makes spare states for every recomputation.
# 2. The capturer registers the spares. In the capture a forward draws from the user's own states, as eager does; a
#    recomputation draws from its spares.
# 3. Before a replay the spares are set: seed and position of the user's states as they stand when the forward's
#    replay begins, plus what the warm-up noted. Both are numbers on the host; nothing synchronises.
#
# So `torch.manual_seed` and a restored state reach the recomputations, a recomputation may stop early, and a forward
# that has no backward leaves nothing out of step, all of which a pair of states that advance in parallel can't have.

Source: TypeAlias = str | None
"""A state that numbers come from: a tracker's name, None for the device's default state."""
Position: TypeAlias = Mapping[Source, tuple[int, int]]
"""Seed and offset by source."""
NOT_WARMED_UP: Final = (
    "while a CUDA graph is being captured, and the recomputation could not draw the same ones. Capture into a "
    "cgpass.CheckpointedGraph() after a `with graph.warm_up():` run of the same code, or draw outside of the checkpoint."
)
CAPTURE_ENDED: Final = (
    "in a recomputation outside of the capture that its forward ran in (or in one that it did not), and can't draw the "
    "same ones. Run forward and backward both while capturing, or both outside."
)

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


def is_capturing() -> bool:
    """Tell if the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class ForbidRandom(torch_private.TorchDispatchMode):
    """Raise at the first operator that draws random numbers; operators without tags are not looked at."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            raise CheckpointError(f"cgpass.checkpoint: {func} draws random numbers {self._why}")
        return func(*args, **kwargs)


class Numbers:
    """Positions of the random number states as a checkpoint begins.

    In a capture without a warm-up a checkpoint works as long as nothing random runs.
    """

    def __init__(self, devices: tuple[torch.device, ...], tracker: RNGStatesTracker | None) -> None:
        """Remember the states of the CPU, of `devices` and of a tracker: in a run, the graph's."""
        self._captured = is_capturing()
        self._run = current_run()
        if self._run is not None:
            tracker = self._run.tracker_for(tracker)
        self._tracker = tracker
        self._current = None if tracker is None else tracker.current
        self._named: Mapping[str, torch.Tensor] = {}
        if self._captured:
            devices = ()
        elif tracker is not None:
            devices = (*devices, tracker.device)
            self._named = tracker.get_states()
        generators = dict.fromkeys(map(default_generator, (torch.device("cpu"), *devices)))
        self._values = [(generator, get_state(generator)) for generator in generators]
        self._starts = {} if self._run is None else self._run.begin(capturing=self._captured)

    def forward(self) -> contextlib.AbstractContextManager[object]:
        """Around the forward."""
        unknown = self._captured and self._run is None
        return ForbidRandom(NOT_WARMED_UP) if unknown else contextlib.nullcontext()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation: draw what the forward drew, and leave every state as it was."""
        with contextlib.ExitStack() as stack:
            if self._captured != is_capturing():
                stack.enter_context(ForbidRandom(CAPTURE_ENDED))
            else:
                stack.enter_context(within(self._run))
                self._restore(stack)
            yield

    def _restore(self, stack: contextlib.ExitStack) -> None:
        for generator, _ in self._values:
            stack.callback(set_state, generator, get_state(generator))
        tracker, run = self._tracker, self._run
        spares = {} if run is None else run.recompute(self._starts, capturing=self._captured)
        if not self._captured and tracker is not None:
            stack.enter_context(tracker._rewound(self._named, self._current))
        for generator, state in self._values:
            set_state(generator, state)
        if self._captured and run is None:
            stack.enter_context(ForbidRandom(NOT_WARMED_UP))
        elif self._captured and run is not None:
            default = default_generator(run.states.device)
            stack.callback(default.graphsafe_set_state, default.graphsafe_get_state())
            default.graphsafe_set_state(spares[self._current])
            if tracker is not None:
                named = {name: spares[name] for name in tracker.generators}
                stack.enter_context(tracker._replaced(named, self._current))


class CheckpointStates:
    """The random number states with which the checkpoints of one captured function recompute.

    `CheckpointedGraph` has one for its graph. Who captures forward and backward apart makes one a recording:

        with states:                # warm-up; the backward may come later, its checkpoints know where they belong
            out = fn(*args)
        backward(out)
        states.register(forward_graph); states.register(backward_graph)     # before capture_begin
        with states:                # around the captured forward
            out = fn(*args)
        ...                         # then the captured backward; replays wait for the stream of the captures
        position = states.position(); forward_graph.replay()
        states.rewind(position); backward_graph.replay()

    For the CPU all of this does nothing: there a recorded recomputation moves the generators itself, by operators.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        rng_tracker: RNGStatesTracker | None = None,
    ) -> None:
        """States for one device, the current CUDA device if None; `rng_tracker` is the one that the code draws from."""
        found = torch.device("cuda" if device is None else device)
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        self.device = found
        self.tracker = rng_tracker
        """The tracker of states that are registered with the graph."""
        self.spares: list[dict[Source, torch.Generator]] = []
        """For each recomputation, what it draws from instead of each source."""
        self.warmed: Run | None = None
        self.recorded: Run | None = None
        self._outer: list[Run | None] = []

    def __enter__(self) -> Self:
        self._outer.append(current_run())
        position = {} if is_capturing() else self.position()
        base = {source: offset for source, (_, offset) in position.items()}
        _local.run = None if self.device.type == "cpu" else Run(self, base)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _local.run = self._outer.pop()

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the generators to register with a graph before its capture begins; complete after a whole warm-up."""
        named = () if self.tracker is None else self.tracker.generators.values()
        return (*named, *(spare for spares in self.spares for spare in spares.values()))

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register all of `generators` with a graph."""
        for generator in self.generators:
            graph.register_generator_state(generator)

    def position(self) -> Position:
        """Return the positions of the user's states; read before the forward's replay. On the host, no synchronisation."""
        if self.device.type == "cpu":
            return {}
        tracker = self.tracker
        default = default_generator(self.device) if tracker is None else tracker._default_state()
        sources = {None: default, **({} if tracker is None else tracker.generators)}
        return {source: (g.initial_seed(), g.get_offset()) for source, g in sources.items()}

    def rewind(self, position: Position) -> None:
        """Set what the recomputations draw from to `position`, from before their forward's replay."""
        for spares, starts in [] if self.recorded is None else self.recorded.taken:
            for source, start in starts.items():
                seed, offset = position[source]
                spares[source].manual_seed(seed)
                spares[source].set_offset(offset + start)

    def require_registered(self, tracker: RNGStatesTracker, which: str, way_out: str = "") -> None:
        """Raise unless a tracker is the one whose states get registered."""
        if tracker is self.tracker:
            return
        has = "none" if self.tracker is None else f"another one, of {_states_of(self.tracker)}"
        raise CheckpointError(
            f"cgpass.checkpoint: {which} ({_states_of(tracker)}) is not the graph's tracker ({has}). A graph takes one: "
            f"pass this one as CheckpointedGraph(rng_tracker=...) or GraphedOptions(rng_tracker=...){way_out}."
        )


def _states_of(tracker: RNGStatesTracker) -> str:
    """Return a description that tells a tracker from others."""
    names = ", ".join(map(repr, tracker.generators))
    return f"states {names}" if names else "no states"


class Run:
    """One run of the code, as warm-up or captured: its checkpoints in order."""

    def __init__(self, states: CheckpointStates, base: Mapping[Source, int]) -> None:
        """Begin at the offsets `base`, empty in a capture."""
        self.states = states
        self.starts: list[Mapping[Source, int]] = []
        """For each checkpoint, how far each state that it may draw from had advanced since the run began."""
        self.taken: list[tuple[Mapping[Source, torch.Generator], Mapping[Source, int]]] = []
        """For each captured recomputation, its spares and its checkpoint's `starts`."""
        self._base = base
        self._recomputed = 0

    def tracker_for(self, tracker: RNGStatesTracker | None) -> RNGStatesTracker | None:
        """The graph's tracker, if neither a checkpoint's own nor the one in whose `fork` it is is another one."""
        states, forked = self.states, forking()
        if forked is not None and forked.device == states.device:
            which = f"the tracker in whose fork({forked.current!r}) this checkpoint is"
            states.require_registered(forked, which, ", or leave its fork before the checkpoint")
        if tracker is not None:
            states.require_registered(tracker, "this checkpoint's rng_tracker")
        return states.tracker

    def begin(self, *, capturing: bool) -> Mapping[Source, int]:
        """Note a checkpoint; in a capture it starts where the same one of the warm-up did."""
        if capturing:
            self.states.recorded = self
            known = [] if self.states.warmed is None else self.states.warmed.starts
            index = len(self.starts)
            if index >= len(known):
                raise CheckpointError(
                    f"cgpass.checkpoint: checkpoint {index} of this capture was not seen in the warm-up, which had "
                    f"{len(known)}. Warm up with the same code that you capture, `with graph.warm_up():`."
                )
            starts = known[index]
        else:
            self.states.warmed = self
            starts = self._advanced()
        self.starts.append(starts)
        return starts

    def _advanced(self) -> Mapping[Source, int]:
        tracker = self.states.tracker
        named: Mapping[str, Any] = {} if tracker is None else tracker.generators
        offsets: dict[Source, int] = {name: g.get_offset() for name, g in named.items()}
        current = None if tracker is None else tracker.current
        offsets[current] = default_generator(self.states.device).get_offset()
        new = [source for source in offsets if source not in self._base]
        if new:
            raise CheckpointError(
                f"cgpass.checkpoint: the state {new[0]!r} was added to the rng_tracker during the warm-up. Add all "
                f"states before the warm-up begins."
            )
        return {source: offset - self._base[source] for source, offset in offsets.items()}

    def recompute(
        self, starts: Mapping[Source, int], *, capturing: bool
    ) -> Mapping[Source, torch.Generator]:
        """Return the generator that the next recomputation draws from once it is captured; a warm-up makes it."""
        spares, index = self.states.spares, self._recomputed
        self._recomputed += 1
        if index == len(spares) and not capturing:
            default = default_generator(self.states.device)
            spares.append({source: default.clone_state() for source in self._base})
        elif index >= len(spares):
            raise CheckpointError(
                f"cgpass.checkpoint: recomputation {index} of this capture has no generator state to draw from; the "
                f"warm-up recomputed {len(spares)} times. Warm up with the same code that you capture, backward included."
            )
        if capturing:
            self.taken.append((spares[index], starts))
        return spares[index]


class CheckpointedGraph(torch.cuda.CUDAGraph):
    """A `torch.cuda.CUDAGraph` for code with `cgpass.checkpoint` and random operators in it.

    Examples:
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).cuda()
        >>> x = torch.randn(2, 4, device="cuda")
        >>> def step():
        ...     cgpass.checkpoint(layer, x).sum().backward()
        >>> graph = cgpass.CheckpointedGraph()
        >>> with graph.warm_up():  # at least once, on a side stream as for any graph
        ...     step()
        >>> with torch.cuda.graph(graph):  # calls graph.capture_begin() and graph.capture_end()
        ...     step()
        >>> graph.replay()

    `step` runs forward and backward. A replay draws what eager would draw next, recomputations repeat the numbers of their
    forward, and the generators end where eager leaves them. Without random operators inside a checkpoint a
    `torch.cuda.CUDAGraph` is enough.
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
        """A graph on the current device; `rng_tracker` has the states that the captured code draws from.

        Raises:
            DriverUnavailableError: There is no CUDA device.
        """
        make: Any = super().__init__  # the C++ class's, which has no stub
        make(keep_graph)
        self._states = CheckpointStates(rng_tracker=rng_tracker)
        self._begun: torch.Event | None = None
        """Replays wait for it: torch writes where random numbers begin on the stream of the capture, too."""

    def warm_up(self) -> contextlib.AbstractContextManager[Any]:
        """A block that runs, without a graph, the code that will be captured, its backward included."""
        return self._states

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """See `torch.cuda.CUDAGraph.capture_begin`; `torch.cuda.graph` calls it."""
        self._states.register(self)
        super().capture_begin(*args, **kwargs)
        self._states.__enter__()

    def capture_end(self) -> None:
        """See `torch.cuda.CUDAGraph.capture_end`; `torch.cuda.graph` calls it."""
        self._states.__exit__()
        super().capture_end()
        self._begun = torch.cuda.current_stream().record_event()

    def replay(self) -> None:
        """Replay, recomputations with the numbers that this replay's forward draws. No synchronisation."""
        if self._begun is not None:
            torch.cuda.current_stream().wait_event(self._begun)
            self._begun = None if self._begun.query() else self._begun
        self._states.rewind(self._states.position())
        super().replay()
