"""Nothing that the user sees changes while callables are warmed up and recorded."""

import contextlib
import random
import sys
import threading
from collections.abc import Iterator

import torch

from cgpass import torch_private
from cgpass.graphed.group import Group
from cgpass.graphed.passes import Pass
from cgpass.runtime.failures import random_state_kept

_here = threading.local()


@contextlib.contextmanager
def prepared(passes: Pass | list[Pass], group: Group) -> Iterator[None]:
    """A block for warm-ups and captures, after which random number states, parameters and buffers are as before it.

    Those of Python and NumPy, too: what code drops by chance is no reason for data to come in another order.

    What the user watches autograd with is off in it: anomaly detection, and hooks of saved tensors around it.

    Args:
        passes: What is recorded.
        group: What records.
    """
    before, _here.prepares = is_preparing(), True
    passes = [passes] if isinstance(passes, Pass) else passes
    tracker = passes[0].options.rng_tracker
    named = [] if tracker is None else list(tracker.generators.values())
    with (
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),  # which would read data in a capture
        torch_private.no_parametrize_cache(),  # which would keep a weight that a warm-up computed, and its graph
        torch_private.no_outer_saved_tensors_hooks(),  # a checkpoint's, which expects what a replay saves
        random_state_kept(group.device, named),
        _host_random_state_kept(),
    ):
        forget = True
        try:
            yield
            forget = passes[0].options.retain_graph_in_backward
        finally:
            group.accumulators.put_back(forget=forget)
            for each in reversed(passes):
                each.kept.put_back()
            _here.prepares = before


@contextlib.contextmanager
def _host_random_state_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before, before_numpy = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(before_numpy)


def is_preparing() -> bool:
    """Whether this thread is in such a block."""
    return getattr(_here, "prepares", False)
