"""Default generators of devices, and whether their states have handles."""

import torch

from cgpass import torch_private
from cgpass.runtime import rng

default_generator = torch_private.default_generator


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator(device).manual_seed(seed)


def is_graph_safe(generator: torch.Generator) -> bool:
    """Whether a generator's state can be exchanged while a CUDA graph is being captured."""
    return generator.device.type == "cuda"


def get_state(generator: torch.Generator) -> torch.Tensor:
    """A generator's state, as an operator where somebody watches operators.

    Returns:
        uint8 `(state_bytes,)` on the CPU. **Lifetime:** the caller's own.
    """
    if generator.device.type == "cpu" and torch_private.num_dispatch_modes():
        return rng.get_state(generator)
    return generator.get_state()


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Put a state back that `get_state` gave."""
    if generator.device.type == "cpu" and torch_private.num_dispatch_modes():
        rng.set_state(generator, state)
    else:
        generator.set_state(state)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
