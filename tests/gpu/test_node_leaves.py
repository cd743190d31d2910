"""Streams of gradients that the compiled node has added at once."""

import pytest
import torch

from cgpass.runtime import fast
from tests.gpu import harness
from tests.unit.runtime.leaves import ALL, NUM, ONE, visits

pytestmark = harness.MARKS

CYCLES = 50_000_000


def slow(value):
    torch.cuda._sleep(CYCLES)
    return torch.full((1 << 16,), value, device="cuda")


class Function:
    """A node over leaves, whose gradients take their time."""

    def __init__(self):
        self.leaves = [torch.zeros(1 << 16, device="cuda").requires_grad_() for _ in range(NUM)]

    def __call__(self):
        x = torch.zeros(3, device="cuda", requires_grad=True)
        behind, out = x.clone(), [torch.ones(3, device="cuda")]
        positions = tuple(range(NUM + 1))
        inputs = (*self.leaves, behind)
        saved = [torch.ones(3, device="cuda")]
        fast.attach(self.run, (), inputs, positions, out, (0,), saved, [], "Node")
        return out[0].sum()

    def run(self, rest, saved, grads):
        saved.clear()
        grads.clear()
        return [*(slow(1.0) for _ in self.leaves), torch.zeros(3, device="cuda")]

    def grads(self):
        return [leaf.grad.min().item() for leaf in self.leaves]


@pytest.mark.parametrize("there", [False, True])
def test_whoever_calls_backward_on_another_stream_may_read_gradients(there):
    fn, side = Function(), torch.cuda.Stream()
    for is_first in (True, False):
        for leaf in fn.leaves:
            leaf.grad = torch.ones_like(leaf) if there else None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = fn()
        torch.cuda.current_stream().wait_stream(side)
        if is_first:
            assert visits(out.backward) == ONE
        else:
            out.backward()
        copies = [leaf.grad.clone() for leaf in fn.leaves]  # on this stream, without a wait
        assert [copy.min().item() for copy in copies] == [2.0 if there else 1.0] * NUM
        del out


def test_a_leaf_whose_gradients_belong_to_another_stream_is_left_to_the_engine():
    fn, side = Function(), torch.cuda.Stream()
    held = [leaf * 1 for leaf in fn.leaves]  # whose accumulators are this stream's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = fn()
    del held
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        assert visits(out.backward) == ALL
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
    assert fn.grads() == [1.0] * NUM


def test_backwards_on_the_stream_of_the_forward():
    fn = Function()
    for n in (1, 2):
        assert visits(fn().backward) == ONE
        assert fn.grads() == [float(n)] * NUM
