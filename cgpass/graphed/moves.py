"""Callables that move their own parameters: a replay would not."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cgpass.errors import CaptureError
from cgpass.graphed.statics import Statics


@contextlib.contextmanager
def not_moved(name: str, statics: Statics, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block in which a callable is captured. What it moves is put back where it was, with the values of now.

    Args:
        name: Of the callable.
        statics: Its parameters and buffers.
        tensors: The same, as they are.

    Raises:
        CaptureError: It moved some.
    """
    before = statics.key_of(tensors)
    places = [tensor.detach() for tensor in tensors]
    yield
    after = statics.key_of(tensors)
    if after == before:
        return
    moved = statics.moved(before, after)
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place
    raise CaptureError(
        f"make_graphed_callables: {name} moves its own parameters or buffers when it runs ({moved}), which no replay "
        "does: they would lie where the graph's memory is. An RNN under torch.nn.utils.weight_norm does so on CUDA "
        "(flatten_parameters). Leave such a module out, or use torch.nn.utils.parametrizations and keep the weights "
        "where they are."
    )
