"""Default generators of devices, and whether their states have handles."""

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on a device draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def new_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator(device).manual_seed(seed)


def is_graph_safe(generator: torch.Generator) -> bool:
    """Whether a generator's state can be exchanged while a CUDA graph is being captured."""
    return generator.device.type == "cuda"


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
