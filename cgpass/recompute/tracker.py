"""Named random number states beside the default one, for tensor-parallel dropout."""

import contextlib
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
            RNGTrackerError: The name is taken.
        """
        if name in self._generators:
            raise RNGTrackerError(
                f"RNGStatesTracker: there is a state named {name!r} already. Choose another name, or reset() first."
            )
        self._generators[name] = new_generator(self._device, seed)

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
        with _drawing_from(self._device, named) as before:
            self._current = name
            self._outside = before if outside is None else outside
            try:
                yield
            finally:
                self._current, self._outside = current, outside

    def get_states(self) -> dict[str, torch.Tensor]:
        """Every state as it is now, to be saved in a checkpoint file. Not while a graph is being captured.

        Returns:
            Copies, uint8 `(state_bytes,)` on the CPU, by name. **Lifetime:** the caller's own.
        """
        return {name: get_state(generator) for name, generator in self._generators.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put states back that `get_states` gave.

        States of a known name are set in place, so that graphs that draw from them follow; new names are added and
        missing ones removed. Not while a graph is being captured, and not inside `fork`.
        """
        for name in set(self._generators) - set(states):
            del self._generators[name]
        for name, state in states.items():
            if name not in self._generators:
                self.add(name, 0)
            set_state(self._generators[name], state)

    def reset(self) -> None:
        """Forget all states."""
        self._generators.clear()

    @contextlib.contextmanager
    def rewound(self, states: Mapping[str, torch.Tensor], current: str | None) -> Iterator[None]:
        """Have every state be as it was for a block, then as it is now."""
        now, self._current, outer = self.get_states(), current, self._current
        try:
            for name, state in states.items():
                set_state(self._known(name), state)
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
    state = get_state(default)
    set_state(default, get_state(named))
    try:
        yield None
    finally:
        set_state(named, get_state(default))
        set_state(default, state)
