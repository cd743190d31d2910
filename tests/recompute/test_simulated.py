"""Checkpoints in simulated graphs: a replay moves the generators as eager does."""

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.recompute.states import CheckpointStates
from cgpass.runtime.simulated import SimulatedDriver
from tests.recompute.steps import plain, same, tensor


def trained(forward):
    """A forward and its backward as one function of a list of one tensor."""

    def fn(args):
        x = args.pop()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = forward(x)
            y.sum().backward()
        return [y.detach(), x.grad]

    return fn


def layer(x):
    return F.dropout(F.dropout(x, 0.5).sin(), 0.5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_replays_are_bitwise_eager(reentrant):
    def forward(x, way=cgpass.checkpoint):
        for _ in range(2):
            x = way(
                lambda x: way(layer, layer(x), use_reentrant=reentrant), x, use_reentrant=reentrant
            )
            x = F.dropout(x, 0.1)
        return x

    x = tensor(16, 16)
    graph, outputs = SimulatedDriver().record(trained(forward), [x], opaque=False)
    for seed in range(3):
        torch.manual_seed(seed)
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3)]
        for way in (cgpass.checkpoint, plain):
            torch.manual_seed(seed)
            expected = trained(lambda x, way=way: forward(x, way))([x])
            same(found, [*expected, torch.rand(3)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tracker(reentrant):
    tracker = cgpass.RNGStatesTracker("cpu")
    tracker.add("model-parallel-rng", 1)
    kept = CheckpointStates("cpu", tracker)

    def fn(x):
        with tracker.fork():
            x = layer(x)
        return layer(x)

    def forward(x, way=cgpass.checkpoint):
        with kept:
            return way(fn, x, use_reentrant=reentrant, rng_tracker=tracker)

    def call(args):
        return trained(forward)(args[:1])

    x = tensor(16, 16)
    graph, outputs = SimulatedDriver().record(call, [x, *kept.generators], opaque=False)
    states = tracker.get_states()
    for seed in range(3):
        torch.manual_seed(seed)
        kept.rewind(kept.position())
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3), *tracker.get_states().values()]
        torch.manual_seed(seed)
        tracker.set_states(states)
        expected = trained(lambda x: forward(x, plain))([x])
        same(found, [*expected, torch.rand(3), *tracker.get_states().values()])
        tracker.set_states(states)


def test_a_tracker_whose_states_are_not_registered():
    tracker = cgpass.RNGStatesTracker("cpu")
    tracker.add("a", 1)

    def fn(args):
        with tracker.fork("a"):
            return [args.pop() + 1]

    with pytest.raises(RuntimeError, match=r"generator used by .* is not registered"):
        SimulatedDriver().record(fn, [tensor(3)], opaque=False)
    assert tracker.current is None


def test_forward_and_backward_recorded_apart():
    driver = SimulatedDriver()
    x = tensor(16, 16).requires_grad_()
    held = []

    def forward(args):
        args.clear()
        with torch.enable_grad():
            held.append(cgpass.checkpoint(lambda x: F.dropout(x, 0.5), x))
        return [held[0].detach()]

    def backward(args):
        return list(torch.autograd.grad(held[0], [x], args.pop(), retain_graph=True))

    first, (y,) = driver.record(forward, [x], opaque=False)
    tangent = torch.ones(16, 16)
    second, (grad,) = driver.record(backward, [tangent], opaque=False)
    torch.manual_seed(0)
    for _ in range(3):
        first.replay()
        between = torch.rand(3)
        second.replay()
        assert torch.equal(grad != 0, y != 0)
        assert not torch.equal(torch.rand(3), between)
