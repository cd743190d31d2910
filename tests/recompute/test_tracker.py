"""Named random number states on CPU."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import cgpass
from tests.recompute.steps import same, tensor


def tracker_of(**seeds):
    tracker = cgpass.RNGStatesTracker("cpu")
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def numbers(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_fork_draws_from_its_state_and_goes_on_there():
    tracker = tracker_of(a=1)
    tracker.add("model-parallel-rng", 2)
    torch.manual_seed(0)
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork():
        assert torch.equal(torch.rand(3), numbers(2, 3))
    with tracker.fork("a"):
        second = torch.rand(3)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(first, torch.rand(3, generator=generator))
    assert torch.equal(second, torch.rand(3, generator=generator))
    assert torch.equal(torch.rand(3), numbers(0, 3))


def test_forks_nest_and_know_their_name():
    tracker = tracker_of(a=1, b=2)
    assert tracker.current is None
    with tracker.fork("a"):
        one = torch.rand(2)
        with tracker.fork("b"):
            assert tracker.current == "b"
            assert torch.equal(torch.rand(2), numbers(2, 2))
        assert tracker.current == "a"
        two = torch.rand(2)
    assert tracker.current is None
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(one, torch.rand(2, generator=generator))
    assert torch.equal(two, torch.rand(2, generator=generator))


def test_an_exception_inside_a_fork():
    tracker = tracker_of(a=1)
    torch.manual_seed(0)
    with contextlib.suppress(ZeroDivisionError), tracker.fork("a"):
        torch.rand(3)
        raise ZeroDivisionError
    assert tracker.current is None
    assert torch.equal(torch.rand(3), numbers(0, 3))


def test_states_are_saved_and_put_back():
    tracker = tracker_of(a=1, b=2)
    saved = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.add("c", 3)
    handle = tracker.generators["a"]
    tracker.set_states(saved)
    assert list(tracker.generators) == ["a", "b"]
    assert tracker.generators["a"] is handle
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    other = tracker_of()
    other.set_states(saved)
    with other.fork("a"):
        assert torch.equal(torch.rand(3), first)
    tracker.reset()
    assert dict(tracker.generators) == {}


def layer(tracker, x, weight):
    x = F.dropout(x @ weight, 0.5)
    with tracker.fork("a"):
        x = F.dropout(x.sin(), 0.5)
    with tracker.fork("b"):
        x = F.dropout(x, 0.25)
    return F.dropout(x, 0.25).exp()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("around", [None, "b"])
def test_a_checkpoint_recomputes_with_the_trackers_states(reentrant, nested, around):
    found = []
    for checkpointed in (True, False):
        tracker = tracker_of(a=1, b=2)
        x, weight = tensor(6, 6, requires_grad=True), tensor(6, 6, seed=1, requires_grad=True)
        torch.manual_seed(0)

        def call(fn, *args, checkpointed=checkpointed, tracker=tracker):
            if not checkpointed:
                return fn(*args)
            return cgpass.checkpoint(fn, *args, use_reentrant=reentrant, rng_tracker=tracker)

        def fn(x, weight, tracker=tracker, call=call):
            y = layer(tracker, x, weight)
            return call(layer, tracker, y, weight) if nested else y

        if around is None:
            ys = [call(fn, x, weight) for _ in range(3)]
        else:
            with tracker.fork(around):
                ys = [call(fn, x, weight) for _ in range(3)]
        for i in (1, 0, 2):
            ys[i].sum().backward()
        with tracker.fork("a"):
            after = torch.rand(3)
        found.append([x.grad, weight.grad, after, torch.rand(3), *tracker.get_states().values()])
    same(*found)


def test_without_the_tracker_the_recomputation_would_differ():
    tracker = tracker_of(a=1)

    def fn(x):
        with tracker.fork("a"):
            return F.dropout(x, 0.5)

    x = tensor(32, 32, requires_grad=True)
    y = cgpass.checkpoint(fn, x)
    y.sum().backward()
    assert not torch.equal(x.grad != 0, y != 0)
