"""Arguments and results of classes that the user made."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import cgpass
from tests.graphed.steps import graphed_twins, net, same, same_grads, twins


class Pair:
    """A node that does not tell what its children are called."""

    def __init__(self, first, second):
        self.first = first
        self.second = second


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Pair(*parts)
)


def test_nodes_without_names_for_their_children(setting):
    module, plain = twins(setting, net())

    def of(layer):
        return lambda pair, *, scale: Pair(layer(pair.first) * scale, pair.second.sin())

    sample = Pair(setting.randn(4, 8), setting.randn(3))
    graphed = setting.graphed(of(module), (sample,), {"scale": 2.0}, modules=(module,))
    given = Pair(setting.randn(4, 8), setting.randn(3))
    found, expected = graphed(given, scale=2.0), of(plain)(given, scale=2.0)
    same((found.first, found.second), (expected.first, expected.second))
    for result in (found, expected):
        result.first.square().sum().backward()
    same_grads(module, plain)
    with pytest.raises(cgpass.errors.InputError, match="leaf 1 of the arguments was \\[3\\]"):
        graphed(Pair(setting.randn(4, 8), setting.randn(5)), scale=2.0)
    with pytest.raises(cgpass.errors.InputError, match=r"leaf 2 of the arguments was 2\.0"):
        graphed(given, scale=3.0)


@dataclasses.dataclass
class Unknown:
    values: object
    number: int = 1


@pytest.mark.parametrize("nested", [False, True])
def test_results_that_hide_tensors_are_refused(setting, nested):
    def wrapped(x):
        return Unknown([x]) if nested else Unknown(x)

    x = setting.randn(3)
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=r"returns a Unknown that is new in each run and not a pytree node",
    ):
        setting.graphed(lambda x: wrapped(x * 2), (x,))
    with pytest.raises(cgpass.errors.InputError, match="a result is a Tagged: a recording takes"):
        setting.graphed(lambda x: (x * 2).as_subclass(type("Tagged", (torch.Tensor,), {})), (x,))
    other = Unknown(3)
    graphed = setting.graphed(lambda x, other: (x * 2, other), (x, other))
    assert graphed(x, other)[1] is other


@pytest.mark.parametrize("requires_grad", [True, False])
def test_views_of_arguments_that_are_laid_out_otherwise(setting, requires_grad, caplog):
    """A view is cut out of the call's own argument, so such a call runs without a graph, and says so."""
    linear = setting.module(torch.nn.Linear(4, 4))

    def fn(x):
        return linear(x), x[-1], x

    graphed = setting.graphed(fn, (setting.randn(3, 2, 4, grad=requires_grad),), modules=(linear,))
    for laid_out in (
        setting.randn(2, 3, 4).transpose(0, 1),
        setting.randn(3, 1, 4).expand(3, 2, 4),
    ):
        x, y = (laid_out.detach().requires_grad_(requires_grad) for _ in range(2))
        found, wanted = graphed(x), fn(y)
        same(found, wanted)
        if requires_grad:
            found[1].square().sum().backward()
            wanted[1].square().sum().backward()
            same(x.grad, y.grad)
    assert "args[0], which it writes or returns, has another memory layout" in caplog.text
    stats = graphed.stats
    assert stats.plain_calls == 2
    found = graphed(setting.randn(3, 2, 4))
    assert found[1].shape == (2, 4)
    assert stats.plain_calls == 2


@pytest.mark.parametrize(
    ("warm", "captured"),
    [
        (lambda y: (y, y), lambda y: (y, None)),
        (lambda y: (y,), lambda y: (y, 3)),
        (lambda y: y, lambda y: (y, y * 3)),
    ],
)
def test_a_result_whose_first_tensors_are_alike(setting, warm, captured):
    runs = []

    def fn(x):
        runs.append(len(runs))
        return (captured if len(runs) == 4 else warm)(x * 2)

    with pytest.raises(
        cgpass.errors.GraphedArgumentError, match=r"fn returns another structure than in the run"
    ):
        setting.graphed(fn, (setting.randn(4),))


class ReturnsBias(torch.nn.Linear):
    """As layers whose bias is added later, with results that have no history."""

    def forward(self, x):
        return x @ self.weight.t(), self.bias, x.detach(), self.weight.detach()


def test_a_parameter_as_a_result_and_results_without_a_history(setting):
    graphed, module, plain = graphed_twins(setting, ReturnsBias(8, 8))
    found = []
    for fn in (graphed, plain):
        x = setting.randn(4, 8, grad=True)
        x.data.fill_(0.5)
        y, bias, given, weight = fn(x)
        assert (given.requires_grad, weight.requires_grad) == (False, False)
        ((y + bias) * given + weight.sum()).square().sum().backward()
        found.append((y, x.grad))
    same(*found)
    same_grads(module, plain)
