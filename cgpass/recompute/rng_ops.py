"""States of CPU generators, read and set by operators.

Whoever records operators to run them again (a simulated graph) then records these too, in their place among the
random operators, and each run moves the generators as the first one did.
"""

import ctypes
from typing import Final

import torch

STATE_BYTES: Final = torch.default_generator.get_state().numel()


@torch.library.custom_op(
    "cgpass::read_rng_state",
    mutates_args=("state",),
    device_types="cpu",
    schema="(Tensor(a!) state, Generator? generator) -> ()",
)
def read_rng_state(state: torch.Tensor, generator: torch.Generator | None) -> None:
    """Write a generator's state, the default one's if None, to `state`, uint8 `(STATE_BYTES,)`."""
    state.copy_((generator or torch.default_generator).get_state())


@torch.library.custom_op(
    "cgpass::set_rng_state",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor state, Generator? generator) -> ()",
)
def set_rng_state(state: torch.Tensor, generator: torch.Generator | None) -> None:
    """Set a generator, the default one if None, to a state that `read_rng_state` wrote.

    Memory that nobody has written is passed over: a backward may be recorded before its forward was ever run again,
    and what it computes then means nothing.
    """
    content = ctypes.string_at(state.data_ptr(), state.numel())
    if content.count(content[:1]) != len(content):
        (generator or torch.default_generator).set_state(state)


@read_rng_state.register_fake
@set_rng_state.register_fake
def _(state: torch.Tensor, generator: torch.Generator | None) -> None:
    """Changes no metadata."""


def get_state(generator: torch.Generator) -> torch.Tensor:
    """A CPU generator's state. **Lifetime:** the caller's own."""
    state = torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")
    read_rng_state(state, _named(generator))
    return state


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Put a state back that `get_state` gave."""
    set_rng_state(state, _named(generator))


def _named(generator: torch.Generator) -> torch.Generator | None:
    return None if generator is torch.default_generator else generator
