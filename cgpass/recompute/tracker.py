"""Named random number states beside the default one, for tensor-parallel dropout."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch

from cgpass import torch_private
from cgpass.errors import RNGTrackerError
from cgpass.runtime import rng

MODEL_PARALLEL: Final = "model-parallel-rng"

default_generator = torch_private.default_generator


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator(device).manual_seed(seed)


def get_state(generator: torch.Generator) -> torch.Tensor:
    """A generator's state, as an operator where somebody watches operators; uint8 `(state_bytes,)` on the CPU."""
    if generator.device.type == "cpu" and torch_private.num_dispatch_modes():
        return rng.read_rng_state(generator)
    return generator.get_state()


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a state that `get_state` gave."""
    if generator.device.type == "cpu" and torch_private.num_dispatch_modes():
        rng.set_rng_state(state, generator)
    else:
        generator.set_state(state)


class _Standing:
    """The state whose numbers the CPU's default generator draws: handles of states as CUDA has them, done by copies.

    Process-wide, as that generator is. While it stands for a named one, that one's own state is out of date.
    """

    generator: torch.Generator | None = None


_forks: Final = threading.local()


class RNGStatesTracker:
    """Random number states by name, each of which a block of code can draw from.

    Tensor parallelism needs some random operators to differ between ranks and others to agree; a state with a seed
    of its own for the former gives both.

    Examples:
        >>> tracker = cgpass.RNGStatesTracker()
        >>> tracker.add("model-parallel-rng", 1234)  # plus the rank
        >>> states = tracker.get_states()
        >>> with tracker.fork():  # the default generator goes on after it as if nothing had been drawn
        ...     x = torch.rand(4, device=tracker.device)
        >>> tracker.set_states(states)
        >>> with tracker.fork():
        ...     torch.equal(x, torch.rand(4, device=tracker.device))
        True
        >>> tracker.reset()
        >>> len(tracker.generators)
        0

    On CUDA `fork` exchanges handles of states, which works while a graph is being captured; the states have to be
    registered with that graph (`generators.values()`, or `cgpass.CheckpointedGraph(rng_tracker=...)`). On CPU it copies
    them.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """An empty tracker for a device; the current CUDA device if None, or the CPU where there is none."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        """The device whose default generator `fork` works on."""
        self.current: str | None = None
        """The name of the innermost `fork`, None outside of any."""
        self._generators: dict[str, torch.Generator] = {}
        self._outside: torch.Generator | None = None

    @property
    def generators(self) -> Mapping[str, torch.Generator]:
        """The states by name, live: who captures a graph registers them with it."""
        return MappingProxyType(self._generators)

    def _default_state(self) -> torch.Generator:
        """The device's default state, inside `fork` the one that comes back after it. CUDA only."""
        return default_generator(self.device) if self._outside is None else self._outside

    def add(self, name: str, seed: int) -> None:
        """Add a state that begins with a seed.

        Raises:
            RNGTrackerError: The name is taken, or the seed is no integer.
        """
        if name in self._generators:
            raise RNGTrackerError(
                f"RNGStatesTracker: there is a state named {name!r} already. Choose another name, or reset() first."
            )
        try:
            self._generators[name] = new_generator(self.device, seed)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RNGTrackerError(
                f"RNGStatesTracker: the seed of {name!r} must be an integer below 2**64, got {seed!r}."
            ) from error

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a named state inside a `with` block; it goes on from there the next time.

        Raises:
            RNGTrackerError: There is no state of that name.
        """
        named = self._generators.get(name)
        if named is None:
            raise RNGTrackerError(
                f"RNGStatesTracker: there is no state named {name!r}; there are {self._names()}. "
                f"add({name!r}, seed) it first."
            )
        outside = self._outside
        with _standing_for(self.device, named, copied=True) as before, self._in_fork(name):
            self._outside = before if outside is None else outside
            try:
                yield
            finally:
                self._outside = outside

    def get_states(self) -> dict[str, torch.Tensor]:
        """Every state as it is now, also inside `fork`, to be saved in a file. Not while a graph is being captured.

        **Lifetime:** copies, uint8 `(state_bytes,)`, the caller's own.
        """
        default, standing = default_generator(self.device), _Standing.generator
        return {
            name: get_state(default if generator is standing else generator)
            for name, generator in self._generators.items()
        }

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put states back that `get_states` gave.

        States of a known name are set in place, so that graphs that draw from them follow; new names are added and
        missing ones removed; all of them or, if one can't be set, none. Not while a graph is being captured.

        Raises:
            RNGTrackerError: Inside `fork`, or for what is no state of this device's generators.
        """
        if self.current is not None:
            raise RNGTrackerError(
                f"RNGStatesTracker: set_states inside fork({self.current!r}), whose end would overwrite the new state. "
                f"Call it after the with block."
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
        try:
            return new_generator(self.device, 0).set_state(state)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RNGTrackerError(
                f"RNGStatesTracker: what set_states got for {name!r} is no state of a generator on {self.device} as "
                f"get_states() gives it: {error}. No state was changed."
            ) from error

    def reset(self) -> None:
        """Forget all states."""
        self._generators.clear()

    @contextlib.contextmanager
    def _rewound(self, states: Mapping[str, torch.Tensor], current: str | None) -> Iterator[None]:
        """Have every state be as it was for a block, in `fork(current)` or in none, then as it is now.

        The value of the default state is the caller's to set inside of the block and after it.
        """
        now = {name: get_state(generator) for name, generator in self._generators.items()}
        named = None if current is None else self._known(current)
        with _standing_for(self.device, named, copied=False), self._in_fork(current):
            try:
                for name, state in states.items():
                    set_state(self._known(name), state)
                yield
            finally:
                for name, state in now.items():
                    set_state(self._known(name), state)

    @contextlib.contextmanager
    def _replaced(
        self, generators: Mapping[str, torch.Generator], current: str | None
    ) -> Iterator[None]:
        """Have other generators stand for the names for a block."""
        now, self._generators = self._generators, dict(generators)
        try:
            with self._in_fork(current):
                yield
        finally:
            self._generators = now

    @contextlib.contextmanager
    def _in_fork(self, name: str | None) -> Iterator[None]:
        outer, forks = self.current, forking()
        self.current, _forks.tracker = name, None if name is None else self
        try:
            yield
        finally:
            self.current, _forks.tracker = outer, forks

    def _known(self, name: str) -> torch.Generator:
        if name not in self._generators:
            raise RNGTrackerError(
                f"RNGStatesTracker: the state {name!r} was there in a checkpoint's forward and is gone in its "
                f"backward; there are {self._names()}. Keep the tracker as it is until the backward is done."
            )
        return self._generators[name]

    def _names(self) -> str:
        return ", ".join(map(repr, self._generators)) or "none"


def forking() -> RNGStatesTracker | None:
    """The tracker in whose `fork` this thread is, the innermost one."""
    return getattr(_forks, "tracker", None)


@contextlib.contextmanager
def _standing_for(
    device: torch.device, named: torch.Generator | None, *, copied: bool
) -> Iterator[torch.Generator | None]:
    """Have a device's default generator stand for a named one, or for none; yields its state where that has a handle.

    On CPU the states are copied there and back, or they are the caller's to set.
    """
    default = default_generator(device)
    if default.device.type == "cuda":
        handle = default.graphsafe_get_state()
        default.graphsafe_set_state(new_generator(device, 0) if named is None else named)
        try:
            yield handle
        finally:
            default.graphsafe_set_state(handle)
        return
    outer, outside = _Standing.generator, get_state(default)
    if named is not None and copied:
        if outer is not None:
            set_state(outer, outside)
        set_state(default, get_state(named))
    _Standing.generator = named
    try:
        yield None
    finally:
        if named is not None and copied:
            set_state(named, get_state(default))
            set_state(default, outside if outer is None else get_state(outer))
        _Standing.generator = outer
