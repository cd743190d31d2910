"""States of recomputed random operators: CUDA's positions through fake generators, whole states on the CPU."""

import pytest
import torch

from cgpass import torch_private
from cgpass.errors import CaptureError, InputError
from cgpass.runtime import rng
from cgpass.runtime.rng import ForwardState, caller_of, forward_states, run_with_state
from tests.generators import FakeGenerator, State
from tests.unit.runtime.runners import COPIED, OPAQUE, counts, runner

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "paired"])


@pytest.fixture
def user(monkeypatch):
    """The user's generator on CUDA."""
    generator = FakeGenerator(State(7))
    real = torch_private.default_generator
    monkeypatch.setattr(
        torch_private,
        "default_generator",
        lambda device: generator if device.type == "cuda" else real(device),
    )
    monkeypatch.setattr(torch_private, "is_capturing", lambda: False)
    return generator


def draw(user, steps):
    """An operator that draws from whatever stands in for the user's generator; says where it drew."""

    def op():
        before = user.get_state()
        user.set_offset(before[1] + steps)
        return before

    return op


def through(*ops):
    """A graph that hands on its other inputs and calls each operator through its state."""

    def graph(args):
        others, states = args[: -len(ops)], args[-len(ops) :]
        drawn = [run_with_state(op, rng_state=s) for op, s in zip(ops, states, strict=True)]
        return [*others, *drawn]

    return graph


@pytest.mark.parametrize("seed", [7, 2**64 - 1], ids=["small", "of torch.manual_seed(-1)"])
def test_a_backward_draws_where_its_forward_noted_that_it_drew(user, seed):
    user.manual_seed(seed).set_offset(40)
    graph = through(draw(user, 4))
    a, positions, where = caller_of(graph, (CUDA,), 1, is_backward=False, exact=True)(["a"])
    assert (a, where, user.get_state()) == ("a", (seed, 40), (seed, 44))
    assert positions.dtype is torch.int64
    backward = caller_of(graph, (CUDA,), 1, is_backward=True, exact=True)
    assert backward(["a", positions, "b"]) == ["a", "b", (seed, 40)]


@pytest.mark.parametrize("devices", [(CUDA, CPU), (CPU, CUDA)], ids=["cuda first", "cpu first"])
@EXACT
def test_pairs_on_the_cpu_beside_pairs_on_cuda(user, devices, exact):
    torch.manual_seed(3)
    graph = through(
        *(draw(user, 4) if d == CUDA else lambda: torch.rand(3).tolist() for d in devices)
    )
    user.set_offset(40)
    *drawn, positions = caller_of(graph, devices, 2, is_backward=False, exact=exact)([])
    user.set_offset(400)
    torch.rand(7)
    before = torch.get_rng_state()
    backward = caller_of(graph, devices, 0, is_backward=True, exact=exact)
    for _ in range(2):
        assert backward([positions]) == drawn
    assert user.get_state() == (7, 400)
    assert torch.equal(torch.get_rng_state(), before)


def test_paired_has_another_seed_for_each_pair_and_the_same_for_the_same_step(user):
    graph = through(draw(user, 4), draw(user, 12))
    forward = caller_of(graph, (CUDA, CUDA), 2, is_backward=False, exact=False)
    first, second, _ = forward([])
    assert first[0] != second[0]
    assert user.get_state() == (7, rng._STEPS_OF_A_CALL)  # far past what either drew
    third, *_ = forward([])
    assert third[0] == first[0]
    assert third[1] != first[1]
    user.manual_seed(7)
    assert forward([])[:2] == [first, second]
    user.manual_seed(8)
    assert forward([])[0] != first


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_an_error_in_an_operator_puts_the_users_generator_back(user, device):
    def fails():
        if device == CPU:
            torch.rand(5)
        raise ValueError("the operator's own")

    state = FakeGenerator(State(9)) if device == CUDA else torch.Generator().manual_seed(9)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="the operator's own"):
        run_with_state(fails, rng_state=state)
    assert user.get_state() == (7, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_in_a_capture_nobody_notes_a_position(user, monkeypatch):
    state = ForwardState(user)
    state.position = 0, 0
    monkeypatch.setattr(torch_private, "is_capturing", lambda: True)
    user.set_offset(40)
    run_with_state(draw(user, 4), rng_state=state)
    assert state.position == (0, 0)


def test_a_runner_learns_the_distance_of_each_shape(user):
    """A kernel that a graph launches draws from where the user's generator then stands."""
    state = ForwardState(user)

    def kernels(x, rng_state):
        user.set_offset(user.get_offset() + 4 * x.numel())
        run_with_state(draw(user, 4), rng_state=rng_state)
        return (x + 1,)

    run = runner(kernels, COPIED, OPAQUE, check_layout=True)
    for size in (2, 3, 2, 3):
        run.run([torch.ones(size), state])
    assert counts(run)[:2] == (2, 2)
    for size, seed, offset in ((2, 5, 40), (3, 5, 80), (2, 6, 0)):
        user.manual_seed(seed).set_offset(offset)
        run.run([torch.ones(size), state])
        assert state.position == (seed, offset + 4 * size)
    assert forward_states([torch.ones(1), state, 3], (1, 2)) == ([state], (6, 0))


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@EXACT
def test_a_capture_of_the_users_own_is_refused(user, monkeypatch, is_backward, exact):
    run = caller_of(through(draw(user, 4)), (CUDA,), 0, is_backward=is_backward, exact=exact)
    monkeypatch.setattr(torch_private, "is_capturing", lambda: True)
    with pytest.raises(CaptureError) as raised:
        run([torch.tensor([[7, 0]])])
    assert str(raised.value) == (
        "a compiled function that recomputes random operators (activation checkpointing with dropout) was called "
        "inside a capture of your own: nobody can tell there which numbers its backward has to repeat. Call it "
        "outside, or checkpoint with cgpass.checkpoint in a capture by hand."
    )
    assert user.get_state() == (7, 0)


def test_positions_that_hooks_made_something_else_of_are_refused(user):
    backward = caller_of(through(draw(user, 4)), (CUDA,), 0, is_backward=True, exact=True)
    with pytest.raises(InputError) as raised:
        backward([torch.tensor([[7, 0]]).half()])
    assert str(raised.value) == (
        "a saved position of random numbers came back as torch.float16: have your saved-tensor hooks return tensors of "
        "integers unchanged"
    )
