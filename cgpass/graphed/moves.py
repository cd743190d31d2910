"""Callables and hooks that move parameters: a replay would not."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cgpass.errors import CaptureError
from cgpass.graphed.statics import Statics, firsts


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
        "does: they would lie where the graph's memory is. Have it write in place, as in weight.data.clamp_(-1, 1) or "
        "weight.data.copy_(value). Where a library does it (an RNN under torch.nn.utils.weight_norm on CUDA, say, by "
        "flatten_parameters), leave such a module out."
    )


@contextlib.contextmanager
def put_back(statics: Statics) -> Iterator[None]:
    """A block in which hooks may move or free parameters and buffers, which then are as a call has them again.

    What was freed gets memory anew, perhaps elsewhere; all else lies where it lay.

    Args:
        statics: The parameters and buffers.
    """
    tensors = statics.now()
    distinct = [tensors[i] for i in firsts(tensors)]
    places = [tensor.data for tensor in distinct]  # which count no versions
    sizes = [place.untyped_storage().nbytes() for place in places]
    values = [place.clone() for place in places]
    try:
        yield
    finally:
        for i, tensor in enumerate(tensors):
            statics.put(i, tensor)
        for tensor, place, size, value in zip(distinct, places, sizes, values, strict=True):
            storage = place.untyped_storage()
            if storage.nbytes() < size:
                storage.resize_(size)
            if not torch.equal(place, value):
                place.copy_(value)
            tensor.data = place
