"""The compiled node by itself."""

import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgpass.runtime import fast


@pytest.mark.parametrize("checked", [True, False])
def test_what_a_backward_reads_dies_as_soon_as_the_backward_gave_it_up(checked):
    alive = []

    def run(rest, saved, grads):
        storages = [StorageWeakRef(t.untyped_storage()) for t in (*saved, *grads)]
        saved.clear()
        grads.clear()
        alive.extend(not storage.expired() for storage in storages)
        return [torch.ones(4)]

    x, outputs, saved = torch.randn(4, requires_grad=True), [torch.ones(4)], torch.ones(4)
    weakref.finalize(saved, lambda: None)  # known to Python until it dies
    lists = ([saved], []) if checked else ([], [saved])
    fast.attach(run, (), (x,), (0,), outputs, (0,), *lists, "Node")
    del saved, lists
    outputs[0].backward(torch.ones(4))
    assert alive == [False, True]  # the caller has the gradient
    assert x.grad.tolist() == [1.0] * 4


def test_gradients_that_nothing_gave_are_zeros():
    seen = []

    def run(rest, saved, grads):
        seen.extend(grads)
        return [None]

    x, outputs = torch.randn(4, requires_grad=True), [torch.ones(4), torch.ones(3)]
    fast.attach(run, (), (x,), (0,), outputs, (0, 1), [], [], "Named")
    assert outputs[0].grad_fn.name() == "Named"
    outputs[0].backward(torch.ones(4))
    assert [grad.tolist() for grad in seen] == [[1.0] * 4, [0.0] * 3]
    assert x.grad is None
