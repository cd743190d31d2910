"""What is around warm-ups and captures."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from cgpass import torch_private
from cgpass.errors import CaptureError, CGPassError
from cgpass.graphed.modules import Statics
from cgpass.graphed.options import GraphedOptions
from cgpass.runtime.driver import is_capture_error
from cgpass.runtime.failures import random_state_kept


@contextlib.contextmanager
def prepared(options: GraphedOptions, device: torch.device) -> Iterator[None]:
    """A block for warm-ups and captures, after which random number states are as before."""
    tracker = options.rng_tracker
    with (
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),  # which would read data in a capture
        torch_private.no_parametrize_cache(),  # which would keep a weight that a warm-up computed, and its graph
        torch_private.no_outer_saved_tensors_hooks(),  # a checkpoint's, which expects what a replay saves
        random_state_kept(device, [] if tracker is None else list(tracker.generators.values())),
    ):
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Have autocast cast every weight anew: a cast weight of another run would be no part of the graph."""
    torch.clear_autocast_cache()
    with torch_private.autocast_cache_off():
        yield


_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<"
"""Where files begin that are none of the user's."""


@contextlib.contextmanager
def blamed(name: str, direction: str) -> Iterator[None]:
    """Have what a capture raises name the callable and the line: `CaptureError` for what torch or CUDA refuse."""
    try:
        yield
    except CGPassError:
        raise
    except Exception as error:
        # of a generator of the callable's own; the driver's words
        if not is_capture_error(error) and "not registered with the graph" not in str(error):
            raise
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        line = _user_line(error)
        where = "" if line is None else f", at {line}"
        raise CaptureError(
            f"make_graphed_callables: the {direction} of {name} can't be captured{where}: {reason}. "
            "Move what waits for the device (or needs the host, or draws from a generator of its own) out of the callable, "
            'or use torch.compile(backend="cgpass"), which captures around it.'
        ) from error


def _user_line(error: BaseException) -> str | None:
    """Return where the user's code was: the innermost frame outside of torch and cgpass."""
    for frame in traceback.extract_tb(error.__traceback__)[::-1]:
        if not frame.filename.startswith(_LIBRARIES):
            line = (frame.line or "").rstrip(":")
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {line}"
    return None


@contextlib.contextmanager
def in_place(statics: Statics) -> Iterator[None]:
    """A block in which hooks may move or free parameters and buffers, which then lie where the call has them."""
    tensors = statics.now()
    before = [(t, t.data, t.untyped_storage().nbytes(), t.data.clone()) for t in tensors]
    try:
        yield
    finally:
        for tensor, place, size, value in before:
            if place.untyped_storage().nbytes() < size:
                place.untyped_storage().resize_(size)
            if not torch.equal(place, value):
                place.copy_(value)
            tensor.data = place
