"""Gradients lie in memory of their own each, whatever the operators made them of."""

import gc
import weakref

import pytest
import torch

from tests.graphed.steps import net, same


def test_leaves_whose_gradients_are_views_of_each_other_accumulate_apart(setting):
    leaves = [torch.nn.Parameter(setting.randn(*size)) for size in ((2, 4), (4, 2))]
    module, (a, w) = torch.nn.ParameterList(leaves), leaves

    def fn(x):
        return ((x + module[0]).view(4, 2) + module[1]) * 2

    x = setting.randn(2, 4, grad=True)
    graphed = setting.graphed(fn, (x,), modules=(module,))
    incoming = torch.ones(4, 2, device=setting.device)
    for _ in range(3):
        graphed(x).backward(incoming)
    for leaf in (a, w, x):
        assert leaf.grad.unique().tolist() == [6.0]
    assert len({leaf.grad.data_ptr() for leaf in (a, w, x)}) == 3
    assert incoming.unique().tolist() == [1.0]


class Returns(torch.autograd.Function):
    """Its gradient is what it saved."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return saved.view_as(saved), None


def test_a_gradient_that_is_an_argument(setting):
    graphed = setting.graphed(Returns.apply, (setting.randn(4, grad=True), setting.randn(4)))
    for _ in range(3):
        x, saved = setting.randn(4, grad=True), setting.randn(4)
        for _ in range(2):
            graphed(x, saved).sum().backward()
        same(x.grad, 2 * saved)


def test_a_result_that_is_kept_on_its_module_holds_nothing_after_the_backward(setting):
    module = setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    module.features = graphed(setting.randn(4, 8, grad=True))
    module.features.square().sum().backward()
    gone = weakref.ref(module)
    del module, graphed
    gc.collect()
    assert gone() is None


def test_a_result_that_is_an_argument_is_not_changed_in_place(setting):
    linear = setting.module(torch.nn.Linear(4, 4))
    graphed = setting.graphed(
        lambda h, rest: (linear(h), rest),
        (setting.randn(2, 4), setting.randn(2, 4, grad=True)),
        modules=(linear,),
    )
    rest = setting.randn(2, 4, grad=True)
    _, passed = graphed(setting.randn(2, 4), rest)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        passed += 1
    (passed * 3).sum().backward()
    assert rest.grad.unique().tolist() == [3.0]
