"""`reset()` leaves nothing behind, however often it is called."""

import gc
from collections import Counter

import torch

from tests.graphed.steps import net, same, same_grads, step, twins


def ours():
    """How many objects of each of our classes there are."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if kind.__module__.startswith("cgpass."))


def in_use(device):
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def again(graphed, plain, x):
    graphed.reset()
    for _ in range(2):
        same(step(graphed, x)[0], step(plain, x)[0])


def test_resets_leave_nothing_behind(setting):
    module, plain = twins(setting, net())
    graphed, x = setting.graphed(module, (setting.randn(4, 8),)), setting.randn(4, 8)
    again(graphed, plain, x)
    before, memory = ours(), in_use(setting.device)
    for _ in range(5):
        again(graphed, plain, x)
    assert ours() == before
    assert in_use(setting.device) == memory
    same_grads(module, plain)
