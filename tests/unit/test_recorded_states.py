"""What recorded code does to the default generator itself: recorded, or refused where a CUDA graph would go wrong."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cgpass.runtime.simulated import SimulatedDriver

REFUSED = "operation not permitted when stream is capturing: "


def record(fn, *args):
    return SimulatedDriver().record(lambda inputs: fn(*inputs), list(args), opaque=False)


def check_replays(fn, x):
    graph, outputs = record(fn, x)
    for seed in range(3):
        torch.manual_seed(seed)
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3)]
        torch.manual_seed(seed)
        for a, b in zip(found, [*fn(x), torch.rand(3)], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_with_its_backward_in_one_recording(reentrant):
    again = functools.partial(checkpoint, use_reentrant=reentrant)

    def layer(x):
        return F.dropout(F.dropout(x, 0.5).sin(), 0.5)

    def fn(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = again(layer, again(layer, F.dropout(x, 0.1)))
            y.sum().backward()
        return [y.detach(), x.grad]

    check_replays(fn, torch.ones(16, 16))


def test_a_forked_generator():
    def fn(x):
        with torch.random.fork_rng(devices=()):
            inside = torch.rand_like(x)
        return [inside, torch.rand_like(x)]

    check_replays(fn, torch.ones(4))


def test_a_state_from_outside_is_not_drawn_from():
    state = torch.get_rng_state()

    def fn(x):
        torch.set_rng_state(state)
        return [torch.rand_like(x)]

    with pytest.raises(RuntimeError) as caught:
        record(fn, torch.ones(2))
    assert str(caught.value) == REFUSED + (
        "aten.rand_like.default draws from a state that was read outside of this recording, where no replay draws. "
        "Recompute by cgpass.checkpoint instead of torch.utils.checkpoint, and set states before the call"
    )


def test_a_state_of_another_recording_is_not_drawn_from():
    driver = SimulatedDriver()
    states = []

    def forward(args):
        states.append(torch.get_rng_state())
        return [args.pop() * torch.rand(2)]

    def backward(args):
        before = torch.get_rng_state()
        torch.set_rng_state(states[0])
        between = torch.get_rng_state()
        torch.set_rng_state(between)
        drawn = torch.rand(2)
        torch.set_rng_state(before)
        return [args.pop() * drawn]

    kept = driver.record(forward, [torch.ones(2)], opaque=False)
    with pytest.raises(RuntimeError, match="draws from a state that was read outside"):
        driver.record(backward, [torch.ones(2)], opaque=False)
    del kept


def test_a_state_from_outside_that_nobody_draws_from():
    state = torch.get_rng_state()

    def fn(x):
        first = torch.rand_like(x)
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(state)
            y = x + 1
        return [y, first, torch.rand_like(x)]

    check_replays(fn, torch.ones(2))


def test_a_state_that_is_left_behind():
    state = torch.get_rng_state()

    def fn(x):
        torch.set_rng_state(state)
        return [x + 1]

    with pytest.raises(RuntimeError, match="set_rng_state without setting it back"):
        record(fn, torch.ones(2))


@pytest.mark.parametrize("seed", [lambda: torch.manual_seed(8), torch.seed])
def test_seeds(seed):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="which no replay repeats"):
        record(lambda x: [seed(), torch.rand_like(x)][1:], torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_that_is_set_does_nothing_as_on_cuda():
    def fn(x):
        first = torch.rand_like(x)
        assert torch.initial_seed() == 2**64 - 7
        assert torch.manual_seed(-7) is torch.default_generator
        return [first, torch.rand_like(x)]

    torch.manual_seed(-7)
    graph, (first, second) = record(fn, torch.ones(2))
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_other_threads_go_on_as_ever():
    found = []

    def elsewhere():
        found.append(torch.manual_seed(11).initial_seed())
        torch.set_rng_state(torch.get_rng_state())
        found.append(torch.initial_seed())

    def fn(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return [x + 1]

    record(fn, torch.ones(2))
    assert found == [11, 11]
    assert torch.random.default_generator is torch.default_generator


def test_an_operator_may_do_what_a_replay_repeats():
    @torch.library.custom_op("cgpass_test::seeded", mutates_args=())
    def seeded(x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        torch.manual_seed(5)
        drawn = torch.rand_like(x)
        torch.set_rng_state(state)
        return drawn

    check_replays(lambda x: [seeded(x), torch.rand_like(x)], torch.ones(3))
