"""Autograd treats a compiled function alike, whether its node is the compiled one or AOTAutograd's function."""

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import cgpass
from tests.unit.training_functions import OPTIONS, randn


def test_it_is_the_node_that_is_tested(made):
    fn = made(lambda x: x.sin().cos(), randn(4))
    found = type(fn(randn(4)).grad_fn)
    assert (found.__name__ == "CppFunction") == made.is_node
    node_of = fn(randn(4)).grad_fn
    assert not made.is_node or node_of.name() == "CompiledFunctionBackward"
    assert isinstance(node_of, torch.autograd.graph.Node)


def test_saved_tensors_that_were_written_are_an_error(made):
    x, y = randn(4), torch.ones(4)
    fn = made(lambda x, y: x * y, x, y)
    out = fn(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_outputs_without_a_gradient_count_as_zeros(made):
    x = randn(4)
    fn = made(lambda x: (x.sin(), x.exp(), x.detach() + 1), x)
    first, second, third = fn(x)
    assert not third.requires_grad
    assert torch.equal(torch.autograd.grad(second.sum(), x, retain_graph=True)[0], x.exp())
    both = torch.autograd.grad(first.sum() + second.sum(), x)[0]
    torch.testing.assert_close(both, x.exp() + x.cos())


def test_inputs_without_a_gradient_get_none(made):
    x, unused, constant = randn(4), randn(4), torch.ones(4)

    def part(x, unused, constant):
        return x.sin() * constant + unused.detach()

    fn = torch.compile(part, backend=cgpass.cgpass, options=OPTIONS)
    for _ in range(4):
        x.grad = None
        fn(x, unused, constant).sum().backward()
        assert torch.equal(x.grad, x.cos())
        assert unused.grad is None
        assert constant.grad is None
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(fn(x, unused, constant).sum(), unused)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_states_that_are_detached_inside_hold_no_history(made):
    """As in streaming: each call's state comes from the last one's."""
    weight = randn(4, 4)

    def step(x, state, weight):
        return (x @ weight + state.detach()).tanh() * state.detach()

    fn = torch.compile(step, backend=cgpass.cgpass, options=OPTIONS)
    state, seen = torch.ones(4), []
    for _ in range(12):
        state = fn(torch.randn(4), state, weight)
        state.sum().backward(retain_graph=True)
        seen.append(weakref.ref(state))
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 2


def test_nothing_is_kept_alive_by_a_cycle(made):
    """The output of `exp` is also what its backward reads."""
    x = randn(4)
    fn = made(torch.exp, x)
    gc.collect()
    gc.disable()
    try:
        for use in (lambda out: None, lambda out: out.sum().backward()):
            out = fn(x)
            use(out)
            dead = weakref.ref(out)
            del out
            assert dead() is None
        counts = cgpass.counters()
        fn(x)
        assert cgpass.counters()["recordings"] == counts["recordings"]
    finally:
        gc.enable()


@torch.library.custom_op("training::raises", mutates_args=())
def raises(grad: torch.Tensor, raise_it: torch.Tensor) -> torch.Tensor:
    if raise_it.any():
        raise LookupError("the user's own")
    return grad.clone()


raises.register_fake(lambda grad, raise_it: torch.empty_like(grad))


@torch.library.custom_op("training::passes", mutates_args=())
def passes(x: torch.Tensor, raise_it: torch.Tensor) -> torch.Tensor:
    return x.clone()


passes.register_fake(lambda x, raise_it: torch.empty_like(x))
passes.register_autograd(
    lambda ctx, grad: (raises(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def test_errors_of_a_backward_come_through(made):
    x, no, yes = randn(4), torch.tensor(False), torch.tensor(True)
    options = {**OPTIONS, "unsafe_ops": ("training::raises",)}
    fn = torch.compile(
        lambda x, raise_it: passes(x.sin(), raise_it).cos(), backend=cgpass.cgpass, options=options
    )
    for _ in range(3):
        fn(x, no).sum().backward()
    out = fn(x, yes)
    with pytest.raises(LookupError, match="the user's own"):
        out.sum().backward()
    x.grad = None
    fn(x, no).sum().backward()
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())


def test_buffers_that_are_written_count_their_versions(made):
    norm = torch.nn.BatchNorm1d(4)
    x = randn(8, 4)
    fn = torch.compile(norm, backend=cgpass.cgpass, options=OPTIONS)
    for _ in range(4):
        fn(x).sum().backward()
    before = norm.running_mean._version
    fn(x)
    assert norm.running_mean._version > before


@pytest.mark.parametrize("calls", [1, 3])
def test_autocast_is_traced_into_it(made, calls):
    """What runs in float32 inside, as rotary embeddings do, is not cast when it is called."""

    def mixed(x, w):
        with torch.autocast("cpu", enabled=False):
            island = x.float() @ w.float()
        return (island @ w).float() + island

    x, w = randn(8, 8), randn(8, 8)
    fn = torch.compile(mixed, backend=cgpass.cgpass, options=OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(mixed(x, w).square().sum(), (x, w)), mixed(x, w)
        for _ in range(calls):
            found = torch.autograd.grad(fn(x, w).square().sum(), (x, w)), fn(x, w)
    assert torch.equal(expected[1], found[1])
    assert all(map(torch.equal, expected[0], found[0]))


def test_deterministic_algorithms_asked_for_late(made):
    x = randn(4)
    out = made(torch.sin, x)(x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_for_a_backward_alone(made):
    x = randn(4)
    fn = made(torch.sin, x)
    out = fn(x)

    def on():
        return torch._dynamo.compiled_autograd._enable(lambda gm: gm)

    if made.is_node:
        with on(), pytest.raises(RuntimeError, match="before the function is compiled"):
            out.sum().backward()
    with on():
        fn(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_tensors_that_are_taken_apart_go_aotautograds_way(made):
    fn = made(lambda x, y: (x * y).sin(), randn(4), torch.ones(4))
    w = TwoTensor(torch.ones(4), torch.full((4,), 2.0)).requires_grad_()
    for _ in range(3):
        w.grad = None
        fn(randn(4), w).sum().backward()
    assert isinstance(w.grad, TwoTensor)
    assert w.grad.b.shape == (4,)
    plain = torch.ones(4, requires_grad=True)
    x = randn(4)
    (x * plain).sin().sum().backward()
    w.grad = None
    fn(x, w).sum().backward()
    assert torch.equal(w.grad.a, plain.grad)
