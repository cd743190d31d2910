"""Named random number states beside the default one, for tensor-parallel dropout."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch

from cgpass.errors import RNGTrackerError
from cgpass.recompute.generators import (
    default_generator,
    get_state,
    is_graph_safe,
    new_generator,
    set_state,
)

MODEL_PARALLEL: Final = "model-parallel-rng"


class _Standing:
    """Whose numbers the CPU's default generator draws: handles of states as CUDA has them, done by copies.

    Process-wide, as that generator is. While it stands for a named one, that one's own state is out of date.
    """

    generator: torch.Generator | None = None


_standing: Final = _Standing()
_forks: Final = threading.local()


class RNGStatesTracker:
    """Random number states by name, each of which a block of code can draw from.

    Tensor parallelism needs some random operators to differ between ranks and others to agree; a state with a seed
    of its own for the former gives both:

        tracker = cgpass.RNGStatesTracker()
        tracker.add("model-parallel-rng", 1234 + rank)
        with tracker.fork():
            x = dropout(x)

    On CUDA `fork` exchanges handles of states, which works while a graph is being captured; the states have to be
    registered with that graph (`generators`, or `cgpass.CheckpointedGraph(rng_tracker=...)`). On CPU it copies them.

    Source: `torch.Generator.graphsafe_get_state`, `graphsafe_set_state`, 2.11 to 2.15: CUDA only.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """An empty tracker.

        Args:
            device: Whose default generator `fork` works on; the current CUDA device, or the CPU where there is none.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._generators: dict[str, torch.Generator] = {}
        self._current: str | None = None
        self._outside: torch.Generator | None = None

    @property
    def device(self) -> torch.device:
        """The device whose default generator `fork` works on."""
        return self._device

    @property
    def current(self) -> str | None:
        """The name of the innermost `fork`, None outside of any."""
        return self._current

    @property
    def generators(self) -> Mapping[str, torch.Generator]:
        """The states by name, live: whoever captures a graph registers them with it."""
        return MappingProxyType(self._generators)

    def default_state(self) -> torch.Generator:
        """The device's default state, inside `fork` the one that comes back after it. CUDA only."""
        return default_generator(self._device) if self._outside is None else self._outside

    def add(self, name: str, seed: int) -> None:
        """Add a state.

        Args:
            name: Of the state.
            seed: It begins with.

        Raises:
            RNGTrackerError: The name is taken, or the name is no text, or the seed no number.
        """
        if not isinstance(name, str):
            raise RNGTrackerError(
                f"RNGStatesTracker: a state's name must be a str, got {type(name).__name__}. Pass add(name, seed)."
            )
        if name in self._generators:
            raise RNGTrackerError(
                f"RNGStatesTracker: there is a state named {name!r} already. Choose another name, or reset() first."
            )
        try:
            self._generators[name] = new_generator(self._device, seed)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RNGTrackerError(
                f"RNGStatesTracker: the seed of {name!r} must be an integer below 2**64, got {seed!r}."
            ) from error

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside a `with` block; it goes on from there the next time.

        Args:
            name: Of the state.

        Raises:
            RNGTrackerError: There is no state of that name.
        """
        named = self._generators.get(name)
        if named is None:
            raise RNGTrackerError(
                f"RNGStatesTracker: there is no state named {name!r}; there are {self._names()}. "
                f"add({name!r}, seed) it first."
            )
        current, outside = self._current, self._outside
        with _drawing_from(self._device, named) as before, _forked_by(self):
            self._current = name
            self._outside = before if outside is None else outside
            try:
                yield
            finally:
                self._current, self._outside = current, outside

    def get_states(self) -> dict[str, torch.Tensor]:
        """Every state as it is now, also inside `fork`, to be saved in a file. Not while a graph is being captured.

        Returns:
            Copies, uint8 `(state_bytes,)` on the CPU, by name. **Lifetime:** the caller's own.
        """
        return {name: get_state(_holder(generator)) for name, generator in self._generators.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put states back that `get_states` gave.

        States of a known name are set in place, so that graphs that draw from them follow; new names are added and
        missing ones removed; all of them or, if one can't be set, none. Not while a graph is being captured.

        Raises:
            RNGTrackerError: Inside `fork`, or for what is no state of this device's generators.
        """
        if self._current is not None:
            raise RNGTrackerError(
                f"RNGStatesTracker: set_states inside fork({self._current!r}), whose end would restore what it drew "
                f"from. Call it after the with block."
            )
        if not isinstance(states, Mapping):
            raise RNGTrackerError(
                f"RNGStatesTracker: set_states takes a mapping of names to states, got {type(states).__name__}. Pass "
                f"what get_states() returned."
            )
        made = {name: self._generator_at(name, state) for name, state in states.items()}
        for name in set(self._generators) - set(made):
            del self._generators[name]
        for name, generator in made.items():
            known = self._generators.setdefault(name, generator)
            if known is not generator:
                set_state(known, states[name])

    def _generator_at(self, name: str, state: torch.Tensor) -> torch.Generator:
        """A new generator in a state."""
        generator = new_generator(self._device, 0)
        try:
            generator.set_state(state)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RNGTrackerError(
                f"RNGStatesTracker: what set_states got for {name!r} is no state of a generator on {self._device}: "
                f"{_described(state)}, expected a uint8 tensor of {generator.get_state().numel()} elements on the CPU "
                f"as get_states() gives it. No state was changed."
            ) from error
        return generator

    def reset(self) -> None:
        """Forget all states."""
        self._generators.clear()

    @contextlib.contextmanager
    def rewound(self, states: Mapping[str, torch.Tensor], current: str | None) -> Iterator[None]:
        """Have every state be as it was for a block, then as it is now.

        The default state is the caller's to set inside of the block and after it: inside, the default generator stands
        for `current`'s state or for none of the tracker's, in whichever `fork` the block itself is.
        """
        now = {name: get_state(generator) for name, generator in self._generators.items()}
        outer = self._current
        named = None if current is None else self._known(current)
        with _standing_for(self._device, named), _forked_by(None if current is None else self):
            try:
                for name, state in states.items():
                    set_state(self._known(name), state)
                self._current = current
                yield
            finally:
                self._current = outer
                for name, state in now.items():
                    set_state(self._known(name), state)

    @contextlib.contextmanager
    def replaced(
        self, generators: Mapping[str, torch.Generator], current: str | None
    ) -> Iterator[None]:
        """Have other generators stand for the names for a block."""
        now, outer = self._generators, self._current
        self._generators, self._current = dict(generators), current
        try:
            with _forked_by(None if current is None else self):
                yield
        finally:
            self._generators, self._current = now, outer

    def _known(self, name: str) -> torch.Generator:
        if name not in self._generators:
            raise RNGTrackerError(
                f"RNGStatesTracker: the state {name!r} was there in a checkpoint's forward and is gone in its "
                f"backward; there are {self._names()}. Keep the tracker as it is until the backward is done."
            )
        return self._generators[name]

    def _names(self) -> str:
        return ", ".join(map(repr, self._generators)) or "none"


@contextlib.contextmanager
def _drawing_from(device: torch.device, named: torch.Generator) -> Iterator[torch.Generator | None]:
    """Exchange a device's default state for a named one; yields the former where states have handles."""
    default = default_generator(device)
    if is_graph_safe(default):
        handle = default.graphsafe_get_state()
        default.graphsafe_set_state(named)
        try:
            yield handle
        finally:
            default.graphsafe_set_state(handle)
        return
    outer, outside = _standing.generator, get_state(default)
    if outer is not None:
        set_state(outer, outside)
    set_state(default, get_state(named))
    _standing.generator = named
    try:
        yield None
    finally:
        set_state(named, get_state(default))
        set_state(default, outside if outer is None else get_state(outer))
        _standing.generator = outer


@contextlib.contextmanager
def _standing_for(device: torch.device, named: torch.Generator | None) -> Iterator[None]:
    """Have a device's default generator stand for a named one, or for none, and draw from that one's state or its own."""
    default = default_generator(device)
    if is_graph_safe(default):
        handle = default.graphsafe_get_state()
        default.graphsafe_set_state(new_generator(device, 0) if named is None else named)
        try:
            yield
        finally:
            default.graphsafe_set_state(handle)
        return
    outer, _standing.generator = _standing.generator, named
    try:
        yield
    finally:
        _standing.generator = outer


def forking() -> RNGStatesTracker | None:
    """The tracker in whose `fork` this thread is, the innermost one."""
    return getattr(_forks, "tracker", None)


@contextlib.contextmanager
def _forked_by(tracker: RNGStatesTracker | None) -> Iterator[None]:
    outer, _forks.tracker = forking(), tracker
    try:
        yield
    finally:
        _forks.tracker = outer


def _holder(generator: torch.Generator) -> torch.Generator:
    """Where a named generator's state is at the moment."""
    if generator is _standing.generator:
        return default_generator(generator.device)
    return generator


def _described(state: object) -> str:
    if not isinstance(state, torch.Tensor):
        return type(state).__name__
    dtype = str(state.dtype).removeprefix("torch.")
    return f"a tensor {dtype}{list(state.shape)} on {state.device}"
