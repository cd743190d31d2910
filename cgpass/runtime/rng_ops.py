"""States of CPU generators, read and set by operators.

Whoever records operators to run them again (a simulated graph) then records these too, in their place among the
random operators, and each run moves the generators as the first one did. Selective checkpoints pass both over: a
state that is read again is the one that the generator has then, and what is set is set.
"""

import ctypes
from typing import Final

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

STATE_BYTES: Final = torch.default_generator.get_state().numel()


@torch.library.custom_op(
    "cgpass::read_rng_state", mutates_args=(), schema="(Generator? generator) -> Tensor"
)
def read_rng_state(generator: torch.Generator | None) -> torch.Tensor:
    """A generator's state, the default one's if None, uint8 `(STATE_BYTES,)`. **Lifetime:** the caller's own."""
    return (generator or torch.default_generator).get_state()


@torch.library.custom_op(
    "cgpass::set_rng_state",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor state, Generator? generator) -> ()",
)
def set_rng_state(state: torch.Tensor, generator: torch.Generator | None) -> None:
    """Set a generator, the default one if None, to a state that `read_rng_state` gave."""
    put_state(generator or torch.default_generator, state)


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator to a state that lies in a recording's memory.

    Memory that nobody has written is passed over: a backward may be recorded before its forward was ever run again,
    and what it computes then means nothing.
    """
    content = ctypes.string_at(state.data_ptr(), state.numel())
    if content.count(content[:1]) != len(content):
        generator.set_state(state)


@read_rng_state.register_fake
def _(generator: torch.Generator | None) -> torch.Tensor:
    """A state's metadata."""
    return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")


@set_rng_state.register_fake
def _(state: torch.Tensor, generator: torch.Generator | None) -> None:
    """Changes no metadata."""


OPERATORS: Final = (read_rng_state._opoverload, set_rng_state._opoverload)
SAC_IGNORED_OPS.update(OPERATORS)


def get_state(generator: torch.Generator) -> torch.Tensor:
    """A CPU generator's state. **Lifetime:** the caller's own."""
    return read_rng_state(_named(generator))


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Put a state back that `get_state` gave."""
    set_rng_state(state, _named(generator))


def _named(generator: torch.Generator) -> torch.Generator | None:
    return None if generator is torch.default_generator else generator
