"""Autograd treats a compiled function alike, whether its node is the compiled one or AOTAutograd's function."""

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import cgpass
from cgpass import torch_private
from cgpass.errors import DoubleBackwardError
from tests.usage.programs import deterministic

OPTIONS = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}


@pytest.fixture(params=["node", "function"])
def made(request, monkeypatch, nothing_compiled_stays):
    """A compiler that makes a function's node one way or the other."""
    if request.param == "function":
        monkeypatch.setattr(torch_private, "autograd_is_plain", lambda: False)

    def make(fn, *args, calls=3, **settings):
        compiled = torch.compile(fn, backend=cgpass.cgpass, options=OPTIONS, **settings)
        for _ in range(calls):  # the backward is compiled, and both are recorded
            results = compiled(*args)
            first = results[0] if isinstance(results, tuple) else results
            inputs = [a for a in args if a.requires_grad]
            torch.autograd.grad(first.sum(), inputs, allow_unused=True)
        return compiled

    make.is_node = request.param == "node"
    return make


def randn(*size):
    return torch.randn(*size, requires_grad=True)


def test_it_is_the_node_that_is_tested(made):
    fn = made(lambda x: x.sin().cos(), randn(4))
    found = type(fn(randn(4)).grad_fn)
    assert (found.__name__ == "CppFunction") == made.is_node
    node_of = fn(randn(4)).grad_fn
    assert not made.is_node or node_of.name() == "CompiledFunctionBackward"
    assert isinstance(node_of, torch.autograd.graph.Node)


def test_inputs_and_outputs_without_a_gradient(made):
    x, unused, constant = randn(4), randn(4), torch.ones(4)
    fn = made(
        lambda x, unused, constant: (x.sin() * constant + unused.detach(), x.exp(), x.detach()),
        x,
        unused,
        constant,
    )
    first, second, third = fn(x, unused, constant)
    assert not third.requires_grad
    assert torch.equal(torch.autograd.grad(second.sum(), x, retain_graph=True)[0], x.exp())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(first.sum(), unused, retain_graph=True)
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, x.exp() + x.cos())
    assert unused.grad is constant.grad is None


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
        with cgpass.expect(recordings=0):
            fn(x)
    finally:
        gc.enable()


@pytest.mark.parametrize("calls", [1, 3])
def test_autocast_is_traced_into_it(made, calls):
    """A part that runs in float32, as rotary embeddings do, is not cast in a call."""

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
    with deterministic(), pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_for_a_backward_alone(made):
    x = randn(4)
    fn = made(torch.sin, x)
    out = fn(x)
    with torch._dynamo.compiled_autograd._enable(lambda gm: gm):
        if made.is_node:
            with pytest.raises(RuntimeError, match="before the function is compiled"):
                out.sum().backward()
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


@pytest.mark.parametrize("op", [torch.exp, lambda x: x.sin().exp(), lambda x: x * 2])
@pytest.mark.parametrize("of", ["what came before", "the input", "the loss"])
def test_a_second_derivative_is_refused_whatever_is_wanted(made, op, of):
    """Also where the backward reads the output, or nothing: autograd leaves out what leads to nothing wanted."""
    before = torch.nn.Linear(4, 4)
    x, scale = randn(3, 4), randn(1)
    fn = torch.compile(op, backend=cgpass.cgpass, options=OPTIONS)
    wanted = {"what came before": [*before.parameters()], "the input": [x], "the loss": [scale]}
    for _ in range(3):
        out = fn(before(x))
        (grad,) = torch.autograd.grad((out * scale).sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad((op(before(x)) * scale).sum(), x)
        torch.testing.assert_close(grad, expected)
        with pytest.raises(DoubleBackwardError):
            torch.autograd.grad(out.mean() + grad.square().sum(), wanted[of])


def test_what_refuses_it_is_not_compiled_itself():
    """A compiled step that calls the backward has Dynamo look at all that runs in it."""
    linear, x = torch.nn.Linear(4, 1), torch.randn(3, 4)

    def step(x):
        linear(x).square().mean().backward()
        return x + 1

    with cgpass.explain() as report:
        fn = torch.compile(step, backend=cgpass.cgpass, options=OPTIONS)
        for _ in range(4):
            fn(x)
    assert [each.code for each in report.graph_breaks] == ["graph_break"]
    assert "test_training.py" in report.graph_breaks[0].line
    assert not report.left_to_eager
