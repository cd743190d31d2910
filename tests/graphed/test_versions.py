"""Changes in place between a forward and its backward: refused where the backward reads what was changed."""

import pytest
import torch

import cgpass
from tests.graphed.steps import net, same, same_grads, twins

changed = pytest.raises(RuntimeError, match="modified by an inplace operation")


def test_a_parameter_that_the_backward_reads(setting):
    module = setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    y = graphed(setting.randn(4, 8))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_parameters_that_it_does_not_read(setting):
    module, plain = twins(setting, net())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    for m, fn in ((module, graphed), (plain, plain)):
        y = fn(x)
        with torch.no_grad():
            m[0].weight.add_(1)
            m[0].bias.add_(1)
            m[3].bias.add_(1)
        y.square().sum().backward()
    same_grads(module, plain)


def test_a_result_without_gradient_that_the_backward_reads(setting):
    def fn(x):
        y = x.exp()
        mask = y > 1
        return y.detach(), mask, torch.where(mask, y, 0.0)

    graphed = setting.graphed(fn, (setting.randn(3, grad=True),))
    for place, change in ((0, lambda t: t.mul_(2)), (1, lambda t: t.logical_not_())):
        outputs = graphed(setting.randn(3, grad=True))
        change(outputs[place])
        with changed:
            outputs[2].sum().backward()


def test_the_callables_own_writes(setting):
    class Scales(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(2)
                self.count.add_(1)
            return x * self.scale

    module, plain = twins(setting, Scales())
    graphed = setting.graphed(module, (setting.randn(4, grad=True),))
    for _ in range(2):
        x = setting.randn(4, grad=True)
        out = graphed(x)
        same(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(plain(x).sum(), x)[0])
    outputs = [graphed(setting.randn(4, grad=True)) for _ in range(2)]
    outputs[1].sum().backward()
    with changed:
        outputs[0].sum().backward()


def test_parameters_that_only_the_recomputation_reads_may_change(setting):
    module, plain = twins(setting, net())
    x = setting.randn(4, 8)
    graphed = setting.graphed(
        lambda x: cgpass.checkpoint(module, x), (setting.randn(4, 8),), modules=(module,)
    )
    for m, fn in ((module, graphed), (plain, lambda x: cgpass.checkpoint(plain, x))):
        y = fn(x)
        with torch.no_grad():
            for p in m.parameters():
                p.add_(1)
        y.square().sum().backward()
    same_grads(module, plain)
