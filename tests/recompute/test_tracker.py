"""Named random number states; on CPU, and recomputations on CUDA, too, where there is a device."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.errors import RNGTrackerError
from tests.recompute.steps import same, tensor, tracker_of


def numbers(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_forks_draw_from_their_states_and_go_on_there():
    tracker = tracker_of(a=1, b=2, **{"model-parallel-rng": 3})
    torch.manual_seed(0)
    found = []
    with tracker.fork("a"):
        found.append(torch.rand(2))
        with tracker.fork("a"):
            found.append(torch.rand(2))
        with tracker.fork("b"), tracker.fork("a"):
            assert tracker.current == "a"
            found.append(torch.rand(2))
        found.append(torch.rand(2))
    with tracker.fork("a"):
        found.append(torch.rand(2))
        inside = tracker.get_states()["a"]
        assert torch.equal(inside, torch.get_rng_state())
    assert torch.equal(inside, tracker.get_states()["a"])
    generator = torch.Generator().manual_seed(1)
    same(found, [torch.rand(2, generator=generator) for _ in found])
    with tracker.fork("b"):
        assert torch.equal(torch.rand(2), numbers(2, 2))
    with tracker.fork():
        assert torch.equal(torch.rand(2), numbers(3, 2))
    assert torch.equal(torch.rand(3), numbers(0, 3))


def test_states_are_not_set_inside_a_fork():
    """They were lost at its end."""
    tracker = tracker_of(a=1)
    states = tracker.get_states()
    with tracker.fork("a"), pytest.raises(RNGTrackerError) as error:
        tracker.set_states(states)
    assert str(error.value) == (
        "RNGStatesTracker: set_states inside fork('a'), whose end would overwrite the new state. Call it after the with block."
    )


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), None])
def test_states_are_set_all_or_none(bad):
    tracker, other = tracker_of(a=1, b=2, c=3), tracker_of(a=4)
    before = tracker.get_states()
    with pytest.raises(RNGTrackerError, match="got for 'b' is no state of a generator on cpu"):
        tracker.set_states({**other.get_states(), "b": bad})
    assert list(tracker.generators) == ["a", "b", "c"]
    same(list(tracker.get_states().values()), list(before.values()))


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
        with tracker.fork("b"):
            x = F.dropout(x, 0.25)
    return F.dropout(x, 0.25).exp()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("around", [None, "b"])
@pytest.mark.parametrize("behind", [None, "a", "b"])
def test_a_checkpoint_recomputes_with_the_trackers_states(device, nested, around, behind):
    """A backward inside of a fork wrote the default state's position into the fork's."""
    found = []
    for checkpointed in (True, False):
        tracker = tracker_of(device, a=1, b=2)
        x, weight = (tensor(6, 6, seed=n).to(device).requires_grad_() for n in (0, 1))
        torch.manual_seed(0)

        def call(fn, *args, checkpointed=checkpointed, tracker=tracker):
            if not checkpointed:
                return fn(*args)
            return cgpass.checkpoint(fn, *args, rng_tracker=tracker)

        def fn(x, weight, tracker=tracker, call=call):
            y = layer(tracker, x, weight)
            return call(layer, tracker, y, weight) if nested else y

        with contextlib.nullcontext() if around is None else tracker.fork(around):
            ys = [call(fn, x, weight) for _ in range(3)]
        with contextlib.nullcontext() if behind is None else tracker.fork(behind):
            for i in (1, 0, 2):
                ys[i].sum().backward()
        with tracker.fork("a"):
            after = torch.rand(3, device=device)
        states = [torch.rand(3, device=device), *tracker.get_states().values()]
        found.append([x.grad, weight.grad, after, *states])
    same(*found)
