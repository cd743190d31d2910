"""Checkpoints on CUDA: eager, in graphs captured by hand, and what they save."""

import gc

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.recompute.states import CheckpointStates
from tests.gpu.harness import on_side_stream
from tests.recompute.steps import plain, tracker_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


class Captured:
    """A training step in one graph, captured by hand."""

    def __init__(self, forward, rng_tracker=None):
        self.forward = forward
        self.x = torch.randn(64, 64, device="cuda", requires_grad=True)
        self.y = None
        self.graph = cgpass.CheckpointedGraph(rng_tracker=rng_tracker)
        on_side_stream(self._warm_up)
        self.x.grad = self.y = (
            None  # nor may a node of the warm-up's graph live on, which knows its stream
        )
        with torch.cuda.graph(self.graph):
            self.eager()

    def _warm_up(self):
        for _ in range(2):
            with self.graph.warm_up():
                self.eager()

    def eager(self):
        self.y = self.forward(self.x)
        self.y.sum().backward()

    def run(self, fn=None):
        """Result and gradient of the third of three replays, or runs of a function."""
        for _ in range(3):
            if fn is None:
                self.x.grad.zero_()
                self.graph.replay()
                y, grad = self.y.detach().clone(), self.x.grad.clone()
            else:
                x = self.x.detach().clone().requires_grad_()
                y = fn(x)
                y.sum().backward()
                y, grad = y.detach(), x.grad
        return [y, grad, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("nested", [False, True])
def test_a_captured_step_is_bitwise_the_eager_one(nested):
    def fn(x):
        x = F.dropout(x.sin(), 0.5)
        return F.dropout(x.cos(), 0.25)

    def forward(x, way=cgpass.checkpoint):
        def layer(x):
            y = way(fn, x) if nested else fn(x)
            return F.dropout(y.exp(), 0.5).sin()

        for _ in range(3):
            x = F.dropout(way(layer, x), 0.1)
        return x

    step = Captured(forward)
    for seed in (1, 2):
        found = []
        for way in (None, forward, lambda x: forward(x, plain)):
            torch.cuda.manual_seed(seed)
            found.append(step.run(way))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_captured_step_with_a_tracker():
    tracker = tracker_of("cuda", **{"model-parallel-rng": 5})

    def fn(x):
        x = F.dropout(x.sin(), 0.5)
        with tracker.fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x.cos(), 0.5)

    def forward(x):
        return cgpass.checkpoint(fn, x, rng_tracker=tracker)

    step = Captured(forward, tracker)
    states = tracker.get_states()
    found = []
    for way in (None, fn):
        torch.cuda.manual_seed(3)
        tracker.set_states(states)
        found.append([*step.run(way), *tracker.get_states().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].count_nonzero() > 0


def test_forward_and_backward_in_graphs_of_their_own():
    def fn(x):
        return F.dropout(F.dropout(x, 0.5), 0.5)

    kept = CheckpointStates()
    x = torch.randn(64, 64, device="cuda", requires_grad=True)

    def warm_up():
        with kept:
            y = cgpass.checkpoint(fn, x)
        y.sum().backward()

    on_side_stream(warm_up)
    x.grad = None
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    kept.register(forward)
    kept.register(backward)
    with kept, torch.cuda.graph(forward):
        y = cgpass.checkpoint(fn, x)
        loss = y.sum()
    with torch.cuda.graph(backward, pool=forward.pool()):
        loss.backward()
    torch.cuda.synchronize()  # a capture's beginning writes seeds on its own stream
    done = []
    for _ in range(3):
        position = kept.position()
        forward.replay()
        done.append((position, y.detach() != 0))
    for i in (1, 0, 2, 0):
        position, _ = done[i]
        kept.rewind(position)
        x.grad.zero_()
        backward.replay()
        found = x.grad != 0
        equal = [torch.equal(found, other) for _, other in done]
        assert equal[i], (i, equal, position, [g.get_offset() for g in kept.generators])


def test_the_first_replay_waits_for_what_the_capture_began_with():
    def step():
        return cgpass.checkpoint(lambda x: F.dropout(x, 0.5), x)

    x = torch.ones(64, 64, device="cuda")
    graph, stream = cgpass.CheckpointedGraph(), torch.cuda.Stream()
    with graph.warm_up():
        step()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        graph.capture_begin()
        y = step()
        graph.capture_end()
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    graph.replay()
    torch.cuda.synchronize()
    torch.cuda.set_rng_state(state)
    assert torch.equal(y, step())


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_peak_memory_is_lower(captured):
    def layer(x):
        for _ in range(8):
            x = F.dropout(x.sin(), 0.1)
        return x

    def peak(way):
        def forward(x):
            for _ in range(8):
                x = way(layer, x)
            return x

        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        graph = cgpass.CheckpointedGraph()

        def step():
            forward(x).sum().backward()
            x.grad = None

        def warm_up():
            with graph.warm_up():
                step()

        on_side_stream(warm_up)
        torch.cuda.reset_peak_memory_stats()
        if captured:
            with torch.cuda.graph(graph):
                step()
        else:
            step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(cgpass.checkpoint) < 0.4 * peak(plain)
