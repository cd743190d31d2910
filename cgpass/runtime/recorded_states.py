"""What code that is recorded does to the CPU's generator through `torch.get_rng_state` and its like.

Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, 2.11 to 2.15. While a CUDA graph is captured a state that is read says
how far this capture has drawn, and setting it goes back there; a state from anywhere else sets the same number, which
then means something else. A seed other than the one that is set raises, the same one does nothing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch

from cgpass import _torch
from cgpass.graph.draws import draws
from cgpass.runtime import rng_ops


class Recorder(Protocol):
    """Who records what a thread does."""

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of this recording made the memory of a tensor."""
        ...


class RecordedStates:
    """The default generator as one recording sees it: its states are read and set by operators, which are recorded.

    Attributes:
        foreign: Whether it stands where another recording, or code outside of any, stood: a replay does not go there,
            so nothing may draw.
    """

    def __init__(self, recorder: Recorder, refuse: Callable[[str], None]) -> None:
        """Args: recorder: who records. refuse: raises, with what was done."""
        self._recorder = recorder
        self._refuse = refuse
        self.foreign = False

    def get_state(self) -> torch.Tensor:
        """`torch.get_rng_state`."""
        if self.foreign:
            return torch.default_generator.get_state()
        return rng_ops.get_state(torch.default_generator)

    def set_state(self, state: torch.Tensor) -> None:
        """`torch.set_rng_state`."""
        self.foreign = not self._recorder.made(state)
        if self.foreign:
            rng_ops.put_state(torch.default_generator, state)
        else:
            rng_ops.set_state(torch.default_generator, state)

    def manual_seed(self, seed: int) -> torch.Generator:
        """`torch.manual_seed`."""
        if seed % 2**64 != torch.default_generator.initial_seed():
            self._refuse("torch.manual_seed, which no replay repeats. Seed before the call")
        return torch.default_generator

    def initial_seed(self) -> int:
        """`torch.initial_seed`."""
        return torch.default_generator.initial_seed()

    def seed(self) -> int:
        """`torch.seed`."""
        self._refuse("torch.seed, which no replay repeats. Seed before the call")
        return torch.default_generator.initial_seed()

    def refuse_draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if an operator draws where no replay draws."""
        if self.foreign and draws(func, args, kwargs):
            self._refuse(f"{func} draws {_FOREIGN}")

    def end(self) -> None:
        """Raise if the recording leaves the generator where no replay leaves it."""
        if self.foreign:
            self._refuse(f"torch.set_rng_state without setting it back, {_FOREIGN}")


_FOREIGN: Final = (
    "from a state that was read outside of this recording, where no replay draws. Recompute by cgpass.checkpoint "
    "instead of torch.utils.checkpoint, and set states before the call"
)


class _Local(threading.local):
    states: RecordedStates | None = None


_local: Final = _Local()
_lock: Final = threading.Lock()
_recordings = 0


class _Stand:
    """Stands for the default generator where torch's functions look it up; other threads get the generator itself."""

    def __getattr__(self, name: str) -> Any:
        states = _local.states
        return getattr(torch.default_generator if states is None else states, name)


_stand: Final = _Stand()


@contextlib.contextmanager
def recorded(states: RecordedStates) -> Iterator[None]:
    """Have torch's functions on the default generator work on `states` in this thread, for a block."""
    global _recordings
    with _lock:
        _recordings += 1
        _torch.replace_default_generator(_stand)
    outer, _local.states = _local.states, states
    try:
        yield
    finally:
        _local.states = outer
        with _lock:
            _recordings -= 1
            if not _recordings:
                _torch.replace_default_generator(torch.default_generator)


@contextlib.contextmanager
def inside_operator() -> Iterator[None]:
    """What an operator does with the generator is its own business: a replay runs it again."""
    outer, _local.states = _local.states, None
    try:
        yield
    finally:
        _local.states = outer
