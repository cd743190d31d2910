"""Checkpoints on CUDA: eager, in graphs captured by hand, and what they save."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import cgpass
from tests.recompute.steps import plain, tracker_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def on_side_stream(fn):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)


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

    def steps(self, way=None):
        """What the last of three replays, or of three eager steps, gives, and where the generator is then."""
        for _ in range(3):
            if way is None:
                self.x.grad.zero_()
                self.graph.replay()
                y, x = self.y, self.x
            else:
                x = self.x.detach().clone().requires_grad_()
                y = way(x)
                y.sum().backward()
            found = [y.detach().clone(), x.grad.clone()]
        return [*found, torch.cuda.get_rng_state()]


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
            found.append(step.steps(way))
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
        found.append([*step.steps(way), *tracker.get_states().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].count_nonzero() > 0


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


@pytest.mark.parametrize("around", [None, "a"])
@pytest.mark.parametrize("behind", [None, "a", "b"])
def test_forward_and_backward_in_forks_of_a_tracker(around, behind):
    """A backward inside of a fork wrote the default state's position into the fork's."""

    def forked(tracker, name):
        return contextlib.nullcontext() if name is None else tracker.fork(name)

    def results(checkpointed):
        tracker = tracker_of("cuda", a=1, b=2)
        torch.cuda.manual_seed(3)

        def fn(x):
            x = F.dropout(x.sin(), 0.5)
            with tracker.fork("b"), tracker.fork("a"):
                x = F.dropout(x, 0.5)
            return F.dropout(x.cos(), 0.5)

        x = torch.linspace(-1, 1, 256, device="cuda", requires_grad=True)
        with forked(tracker, around):
            if checkpointed:
                y = cgpass.checkpoint(fn, x, rng_tracker=tracker)
            else:
                y = fn(x)
        with forked(tracker, behind):
            torch.rand(3, device="cuda")
            inside = tracker.get_states()
            y.sum().backward()
            assert torch.equal(tracker.get_states()["a"], inside["a"])
        states = tracker.get_states().values()
        return [y.detach(), x.grad, torch.cuda.get_rng_state(), *states]

    found, expected = results(True), results(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
