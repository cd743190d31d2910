"""Streams of gradients that the compiled node has added at once."""

import pytest
import torch

from cgpass.runtime import node
from tests.gpu import harness

pytestmark = harness.MARKS

CYCLES = 50_000_000
NUM = 4


@pytest.fixture(autouse=True)
def compiled():
    if not node.wait():
        pytest.skip("no C++ compiler")


def slow(value):
    torch.cuda._sleep(CYCLES)
    return torch.full((1 << 16,), value, device="cuda")


class Function:
    """A node over leaves, whose gradients take their time."""

    def __init__(self):
        self.leaves = [torch.zeros(1 << 16, device="cuda").requires_grad_() for _ in range(NUM)]
        self.edges = None
        self.node = None
        """Of the last call; a graph with a hook that holds its node would live for good."""

    def __call__(self):
        x = torch.zeros(3, device="cuda", requires_grad=True)
        behind, out = x * 1, [torch.ones(3, device="cuda")]
        positions = tuple(range(NUM + 1))
        inputs = (*self.leaves, behind)
        node.attach()(self.run, (), inputs, positions, (), out, (0,), [], [], "Node", True, True)
        self.node = out[0].grad_fn
        behind.register_hook(self.look)
        return out[0].sum()

    def look(self, gradient):
        self.edges = [edge is not None for edge, _ in self.node.next_functions]

    def run(self, rest, saved, grads):
        saved.clear()
        grads.clear()
        return [*(slow(1.0) for _ in self.leaves), torch.zeros(3, device="cuda")]

    def grads(self):
        return [leaf.grad.min().item() for leaf in self.leaves]


ONE = [True] + [False] * (NUM - 1) + [True]


@pytest.mark.parametrize("there", [False, True])
def test_whoever_calls_backward_on_another_stream_may_read_gradients(there):
    fn, side = Function(), torch.cuda.Stream()
    for _ in range(2):
        for leaf in fn.leaves:
            leaf.grad = torch.ones_like(leaf) if there else None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = fn()
        torch.cuda.current_stream().wait_stream(side)
        out.backward()
        copies = [leaf.grad.clone() for leaf in fn.leaves]  # on this stream, without a wait
        assert fn.edges == ONE
        assert [copy.min().item() for copy in copies] == [2.0 if there else 1.0] * NUM
        del out
        fn.node = None


def test_a_leaf_whose_gradients_belong_to_another_stream_is_left_to_the_engine():
    fn, side = Function(), torch.cuda.Stream()
    held = [leaf * 1 for leaf in fn.leaves]  # whose accumulators are this stream's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = fn()
    del held
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        out.backward()
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
    assert fn.grads() == [1.0] * NUM
    assert fn.edges == [True] * (NUM + 1)


def test_backwards_on_the_stream_of_the_forward():
    fn = Function()
    for n in (1, 2):
        fn().backward()
        assert fn.edges == ONE
        assert fn.grads() == [float(n)] * NUM
        fn.node = None
