"""Tensors that a forward keeps for its backward in other ways than operators do."""

from contextlib import nullcontext as nothing

import pytest
import torch

import cgpass
from cgpass.errors import GraphedBackwardError
from cgpass.graphed.differentiated import Differentiated
from tests.graphed.steps import clear_grads, graphed_twins, net, same_grads, twins
from tests.graphed.test_orders import check


class Keeps(torch.autograd.Function):
    """Keeps its input, and what it made of it, as attributes."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.made = x, x.sin()
        return x * ctx.made

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.made + ctx.x * ctx.x.cos())


class LetsGo(torch.autograd.Function):
    """Lets go of what it keeps, once it was read."""

    @staticmethod
    def forward(ctx, x):
        ctx.factors = x.cos(), 3
        return x.sin() * 3

    @staticmethod
    def backward(ctx, grad):
        (cos, factor), ctx.factors = ctx.factors, None
        return grad * cos * factor


class AsksTwice(torch.autograd.Function):
    """Lets go of what it saved, and asks for it again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sin(), x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        made = grad * ctx.saved_tensors[1]
        return made + 0 * ctx.saved_tensors[0]


class Rounds(torch.autograd.Function):
    """Keeps its result beside autograd, as straight-through estimators do."""

    @staticmethod
    def forward(ctx, x):
        found = x.round()
        ctx.found = found.detach()
        return found

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.found.abs() <= 1)


def clipped(x):
    """Its hook keeps the result."""
    found = x * 2
    kept = found.detach()
    if found.requires_grad:
        found.register_hook(lambda grad: grad * (kept.abs() < 1))
    return found


class Runs(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.inner, self.fn = net(), fn

    def forward(self, x):
        return self.fn(self, self.inner(x))


class Applies(Runs):
    def forward(self, x):
        self.left = self.fn(self.inner(x) + x)
        return self.fn(self.left)


def gated(x):
    return torch.tanh(x) * torch.sigmoid(x)


WAYS = {
    "attributes": Keeps.apply,
    "asked for twice": AsksTwice.apply,
    "a result": Rounds.apply,
    "a result in a hook": clipped,
    "TorchScript": None,
    "operators": torch.sin,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "order", [(1, -1, 2, -2), (1, 2, -2, -1), (1, 2, 3, -3, -2, -1), (1, 2, 3, -1)]
)
def test_forwards_that_are_pending(setting, way, order):
    module, plain = twins(setting, Applies(WAYS[way]))
    if way == "TorchScript":
        module.fn = plain.fn = torch.jit.script(gated)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for _ in range(3):
        check(setting, [(module, plain)], [(graphed, plain)] * 3, order)
    assert graphed.graphed.stats.plain_calls == 0


class HasGradient(torch.autograd.Function):
    """Computes its gradient in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.grad = x.cos()
        return x.sin().sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad


def test_a_gradient_that_is_kept_is_computed_once_and_given_twice(setting):
    graphed, module, plain = graphed_twins(
        setting, Runs(lambda module, x: HasGradient.apply(x[:, :8]))
    )
    x = setting.randn(4, 8)
    for resets in (False, True):
        outs = [each(x) for each in (graphed, plain)]
        if resets:
            graphed.graphed.reset()
        for out, own in zip(outs, (module, plain), strict=True):
            out.backward(retain_graph=True)
            for parameter in own.parameters():
                parameter.grad.mul_(0.5)  # which may be what the backward gave
            out.backward()
        same_grads(module, plain)


CACHE = {}


class Pops(torch.autograd.Function):
    """Takes what it needs out of a cache."""

    @staticmethod
    def forward(ctx, x):
        ctx.key = object()
        CACHE[ctx.key] = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * CACHE.pop(ctx.key)


def test_a_backward_that_lets_go_of_what_it_needs_runs_once(setting):
    graphed, module, plain = graphed_twins(setting, Runs(lambda module, x: Pops.apply(x)))
    for resets in (False, True):
        x = setting.randn(4, 8)
        outs = [each(x) for each in (graphed, plain)]
        for out in outs:
            out.sum().backward(retain_graph=True)
        same_grads(module, plain)
        late = graphed(x)
        if resets:
            graphed.graphed.reset()
        with pytest.raises(GraphedBackwardError, match="lets go of what it needs"):
            (late if resets else outs[0]).sum().backward()


def logged(module, x):
    module.seen = x.mean()
    return x.sin()


def test_what_other_forwards_let_go_of_is_nothing_that_a_backward_needs(setting):
    module, plain = twins(setting, Runs(logged))
    samples = tuple((setting.randn(4, 8),) for _ in range(2))
    graphed = setting.graphed((module,), samples, order=[1, 1, -1, -1])
    x = setting.randn(4, 8)
    for out in (graphed[0](x), plain(x)):
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
    same_grads(module, plain)


def moved():
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, moved, nothing])
@pytest.mark.parametrize("fn", [LetsGo.apply, torch.sin])
def test_saved_tensors_that_are_elsewhere_by_then(setting, around, fn):
    graphed, module, plain = graphed_twins(setting, Applies(fn))
    for _ in range(3):
        for each in (graphed, plain):
            torch.manual_seed(1)
            x, others = setting.randn(4, 8, grad=True), []
            with around():
                y = each(x)
            with torch.no_grad():
                others += [each(setting.randn(4, 8)) for _ in range(3)]
            y.square().sum().backward(retain_graph=fn is torch.sin)
            if fn is torch.sin:
                y.sum().backward()
        same_grads(module, plain)
    assert graphed.graphed.stats.plain_calls == 0


class Draws(torch.nn.Module):
    """Its checkpoint keeps a random number state, its function what it likes."""

    def __init__(self):
        super().__init__()
        self.inner = net(dropout=0.3)

    def forward(self, x):
        return cgpass.checkpoint(self.inner, Keeps.apply(x)) + Keeps.apply(self.inner(x))


@pytest.mark.parametrize("order", [(1, 2, 3, -1, -2, -3), (1, -1, 2, 3, -2, -3)])
def test_older_recordings_leave_what_is_kept_alone(setting, order):
    """In the order of the recordings, the third forward comes after the first backward, and lies where that writes."""
    module, plain = twins(setting, Draws())
    samples = tuple((setting.randn(4, 8, grad=True),) for _ in range(3))
    graphed = setting.graphed((module,), samples, order=[1, 1, -1, 1, -1, -1])
    for _ in range(4):
        check(setting, [(module, plain)], [(fn, plain) for fn in graphed], order)
    assert all(fn.stats.plain_calls == fn.stats.rerecordings == 0 for fn in graphed)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize(("fn", "size"), [(torch.tanh, 4096), (torch.neg, 0)])
def test_results_that_their_receiver_resizes(setting, calls, fn, size):
    graphed, module, plain = graphed_twins(setting, Applies(fn))
    for _ in range(3):
        for each in (graphed, plain):
            torch.manual_seed(1)
            y = each(setting.randn(4, 8))
            loss = y.sum()
            y.detach().untyped_storage().resize_(size)
            others = [each(setting.randn(4, 8)) for _ in range(calls)]
            loss.backward(retain_graph=True)
            loss.backward()
            del others
        same_grads(module, plain)
    assert graphed.graphed.stats.plain_calls == 0


@pytest.mark.parametrize("fn", [LetsGo.apply, AsksTwice.apply])
def test_a_backward_whose_parameters_moved_is_told_of_once(setting, fn, caplog):
    graphed, module, plain = graphed_twins(setting, Applies(fn))
    for _ in range(2):
        x = setting.randn(4, 8)
        outs = graphed(x), plain(x)
        for each in (module, plain):
            each.inner[0].weight.data = each.inner[0].weight.data.clone()
        for out in outs:
            out.square().sum().backward()
        same_grads(module, plain)
    assert caplog.text.count("runs a backward without a graph: its parameters moved") == 1


def test_weights_are_not_held_by_recordings(setting):
    """A replaced weight is gone with its holders."""
    module, plain = twins(setting, net())
    graphed, storages = setting.graphed(module, (setting.randn(4, 8),)), []
    for _ in range(3):
        x = setting.randn(4, 8)
        for each, fn in ((module, graphed), (plain, plain)):
            each.load_state_dict({k: v * 2 for k, v in each.state_dict().items()}, assign=True)
            fn(x).square().sum().backward()
        storages.append(
            torch.multiprocessing.reductions.StorageWeakRef(module[0].weight.untyped_storage())
        )
        same_grads(module, plain)
        clear_grads(module, plain)
    assert [ref.expired() for ref in storages] == [True, True, False]


def test_what_a_graph_saved_is_held_by_nobody_else(setting):
    x = setting.randn(4, grad=True)  # which the sine of x saves as it is
    graphed = setting.graphed(lambda x: x.sin().exp().sin(), (x,))
    run = Differentiated(graphed, (), warms_up=False)
    run.forward([x])
    saved = run.separate()
    refs = [torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in saved]
    del saved
    assert [ref.expired() for ref in refs] == [True, False]
