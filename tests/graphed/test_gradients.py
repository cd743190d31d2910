"""Gradients: when hooks of leaves run, where gradients lie, and what was changed in place before the backward."""

import gc
import weakref

import pytest
import torch

import cgpass
from tests.graphed.steps import check, net, same, same_grads, twins
from tests.unit.runtime.leaves import visits


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_parameters_run_once_in_each_backward(setting, before):
    module, plain = twins(setting, net())
    calls = []

    def register():
        for m in (module, plain):
            for p in m.parameters():
                p.register_hook(lambda grad, m=m: calls.append(m) or 2 * grad)

    if before:
        register()
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    assert not calls
    if not before:
        register()
    check(setting, graphed, plain, 2, grad=False)
    assert calls.count(module) == calls.count(plain) == 8


def test_gradients_of_parameters_are_added_without_a_task_each(setting):
    module, plain = twins(setting, net())
    sample = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (sample,))
    for _ in range(3):
        x = setting.randn(4, 8, grad=True)
        visited = visits(graphed(x).square().sum().backward)
        assert visited == 1  # of x, a leaf, too
        plain(x).square().sum().backward()
        same_grads(module, plain)


def test_a_result_that_is_kept_on_its_module_holds_nothing_after_the_backward(setting):
    module = setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    module.features = graphed(setting.randn(4, 8, grad=True))
    module.features.square().sum().backward()
    gone = weakref.ref(module)
    del module, graphed
    gc.collect()
    assert gone() is None


changed = pytest.raises(RuntimeError, match="modified by an inplace operation")


def test_parameters_that_it_reads_and_others(setting):
    module, plain = twins(setting, net())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    for m, fn in ((module, graphed), (plain, plain)):
        y, other = fn(x), fn(x)
        with torch.no_grad():
            m[0].weight.add_(1)
            m[0].bias.add_(1)
            m[3].bias.add_(1)
        y.square().sum().backward()
        with torch.no_grad():
            m[3].weight.add_(1)
        with changed:
            other.sum().backward()
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


def test_a_second_backward_of_what_saved_nothing_is_refused(setting):
    """Eager allows it; results have one backward here, whatever it reads."""
    graphed = setting.graphed(lambda x: x * 2, (setting.randn(3, grad=True),))
    x = setting.randn(3, grad=True)
    out = graphed(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    same(x.grad, torch.full_like(x, 4.0))
    message = "a second backward through one forward. Ask for its gradients together"
    with pytest.raises(cgpass.errors.GraphedBackwardError, match=message):
        out.sum().backward()


def test_an_argument_that_is_returned_gets_no_history(setting):
    linear = setting.module(torch.nn.Linear(4, 4))
    sample = (setting.randn(3, 4, grad=True),)
    graphed = setting.graphed(lambda x: (linear(x), x, x[0]), sample, modules=(linear,))
    x = setting.randn(3, 4)
    made, same_one, view = graphed(x)
    assert (x.grad_fn, x.requires_grad) == (None, False)
    (made.sum() + same_one.sum() + view.sum()).backward()
    same(linear.bias.grad, torch.full_like(linear.bias, 3.0))


SHARED = {
    "a part": lambda h: (h, h[:, 0]),
    "another shape": lambda h: (h.view(-1), h),
    "two parts": lambda h: (h[:, :2], h[:, 2:]),
    "a copy": lambda h: (h, h.clone()),
}


@pytest.mark.parametrize("way", SHARED)
def test_results_are_written_unless_they_share_elements(setting, way):
    layer = setting.module(torch.nn.Linear(4, 4))

    def plain(x):
        return SHARED[way](layer(x).sin())

    graphed = setting.graphed(plain, (setting.randn(3, 4),), modules=(layer,))
    x, found = setting.randn(3, 4), []
    if way in ("a part", "another shape"):
        with pytest.raises(RuntimeError, match="SharedResult"):
            graphed(x)[0].mul_(0.5)
        return
    for fn in (graphed, plain):
        first, second = fn(x)
        loss = (first.mul_(0.5) * second.mean()).sum()
        found.append(torch.autograd.grad(loss, [*layer.parameters()]))
    same(*found)
