"""Second derivatives are refused, whichever node autograd calls and whatever is wanted."""

import pytest
import torch

import cgpass
from tests.unit.training_functions import OPTIONS, randn


@pytest.mark.parametrize("op", [torch.exp, torch.tanh, lambda x: x.sin().exp(), lambda x: x * 2])
def test_a_second_derivative_is_refused(made, op):
    """Whatever the backward reads: the input, the output, something in between, nothing."""
    if not made.is_node and torch.__version__ < "2.14":
        pytest.skip("zeros, as of AOTAutograd's function")
    x = randn(4)
    fn = made(op, x)
    (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(op(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="double backward"):
        (grad.sum() + x.sum()).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("of", ["parameters", "what came before", "the input", "the loss"])
@pytest.mark.parametrize("how", [torch.autograd.grad, torch.autograd.backward])
def test_a_penalty_is_refused_whatever_is_wanted(made, how, of):
    """Autograd must not leave out the node that raises, where only some gradients are asked for."""
    before, linear = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    fn = torch.compile(lambda x: linear(x).tanh(), backend=cgpass.cgpass, options=OPTIONS)
    x, scale = randn(3, 4), randn(1)
    for _ in range(3):
        out = fn(before(x))
        (gradient,) = torch.autograd.grad((out * scale).sum(), x, create_graph=True)
        wanted = {
            "parameters": list(linear.parameters()),
            "what came before": list(before.parameters()),
            "the input": [x],
            "the loss": [scale],
        }[of]
        with pytest.raises(RuntimeError, match="double backward"):
            how(out.mean() + gradient.square().sum(), inputs=wanted)


@pytest.mark.parametrize("kind", ["hvp", "jvp", "hessian"])
def test_second_derivatives_by_functional_are_refused(made, kind):
    if kind == "hessian" and not made.is_node and torch.__version__ < "2.14":
        pytest.skip("zeros, as of AOTAutograd's function")
    x = randn(4)
    fn = made(lambda x: x * x, x)  # what it saves leads AOTAutograd's function to its input
    vector = () if kind == "hessian" else (torch.ones(4),)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="double backward"):
            getattr(torch.autograd.functional, kind)(
                fn if kind == "jvp" else lambda x: fn(x).sum(), x, *vector
            )


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
    assert "test_double_backward.py" in report.graph_breaks[0].line
    assert not report.left_to_eager
