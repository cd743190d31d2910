"""Values saved for a backward, and read by it, while a callable is recorded."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from tests.graphed.steps import Setting, check, graphed_twins, move, net, same, same_grads, twins


class Fused(torch.autograd.Function):
    """Adds the weight's gradient to an attribute of it, as fused gradient accumulation does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(grad.t(), x)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad @ weight, None
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.zeros_like(weight)


class FusedLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Fused.apply(x, self.weight)


def accumulate(*modules, asks=True):
    """Give them zeros to add to; a weight that asks is told of it, and gets a gradient."""
    for each in modules:
        each.weight.main_grad = torch.zeros_like(each.weight)
        if asks:
            each.weight.grad_added_to_main_grad = False


@pytest.mark.parametrize("said", [None, False, True])
def test_fused_gradient_accumulation(setting, said):
    """`said` was left on the weight by a step before; None: it does not ask."""
    module, plain = twins(setting, FusedLinear())
    accumulate(module, plain, asks=said is not None)
    if said:
        module.weight.grad_added_to_main_grad = True
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    same(module.weight.main_grad, torch.zeros_like(plain.weight))
    fired = []
    for each in (module, plain):
        each.weight.register_post_accumulate_grad_hook(fired.append)
    for number in range(1, 4):
        if said is not None:
            module.weight.grad_added_to_main_grad = False
        check(setting, graphed, plain)
        assert said is None or module.weight.grad_added_to_main_grad
        same(module.weight.main_grad, plain.weight.main_grad)
        assert len(fired) == 2 * number


def test_another_main_grad(setting):
    """New or there before, of a parameter, of a new one on its memory, or between a forward and its backward."""
    module, plain = twins(setting, FusedLinear())
    accumulate(module, plain)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    stats, first = graphed.graphed.stats, {fn: fn.weight.main_grad for fn in (graphed, plain)}

    def step(change=lambda fn: None):
        x = setting.randn(4, 8)
        for fn in (graphed, plain):
            y = fn(x).square().sum()
            change(fn)
            y.backward()
        same(graphed.weight.main_grad, plain.weight.main_grad)

    def replace(fn):
        fn.weight = torch.nn.Parameter(fn.weight.data)
        accumulate(fn)

    def put_back(fn):
        fn.weight.main_grad = first[fn]

    step()
    for change, recorded in ((accumulate, 1), (put_back, 1), (replace, 2), (accumulate, 3)):
        for fn in (graphed, plain):
            change(fn)
        step()
        assert (stats.rerecordings, stats.plain_calls) == (recorded, 0)
    step(accumulate)
    step()
    assert stats.plain_calls == 1


class FusedLater(Fused):
    """Adds to `main_grad` where there is one."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if hasattr(weight, "main_grad"):
            return Fused.backward(ctx, grad)
        return grad @ weight, grad.t() @ x


class LinearLater(FusedLinear):
    def forward(self, x):
        return FusedLater.apply(x, self.weight)


def test_a_main_grad_that_a_later_recording_adds_to(setting):
    graphed, module, plain = graphed_twins(setting, LinearLater())
    for number in range(5):
        if number == 1:
            move(module, plain)
        if number in (1, 3):
            accumulate(module, plain, asks=False)
        check(setting, graphed, plain)
    same(module.weight.main_grad, plain.weight.main_grad)
    assert (graphed.graphed.stats.rerecordings, graphed.graphed.stats.plain_calls) == (2, 0)


CHECKPOINTS = {
    "ours": cgpass.checkpoint,
    "torch's": functools.partial(torchs, use_reentrant=False),
    "torch's, to its end": functools.partial(torchs, use_reentrant=False, early_stop=False),
}


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recorded_again_in_a_checkpoint(setting, way, dropout):
    graphed, module, plain = graphed_twins(setting, net(dropout=dropout))
    for _ in range(3):
        move(module, plain)
        check(setting, *(functools.partial(CHECKPOINTS[way], fn) for fn in (graphed, plain)))
        same_grads(module, plain)
    stats = graphed.graphed.stats
    assert stats.rerecordings <= 6  # each time for the forward, which waits, and to recompute
    assert stats.plain_calls <= 1  # on CUDA autograd's thread recomputes, and recordings go once


class PacksInside(torch.nn.Module):
    """Saves some tensors in half of their size, another one as it is."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.packed = []

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, torch.Tensor.float):
            y = self.inner(x)
        return y.sin()

    def pack(self, tensor):
        self.packed.append(tensor.shape)
        return tensor.bfloat16()


def test_hooks_around_see_nothing_of_a_recording_and_those_inside_all(setting):
    graphed, module, plain = graphed_twins(setting, PacksInside())
    x, seen = setting.randn(4, 8, grad=True), []
    move(module)
    before = len(module.packed)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            found = graphed(x)
        assert graphed.graphed.stats.rerecordings == 1
        assert len(module.packed) > before
        seen.clear()
        x.exp()
    assert len(seen) == 1  # they are back
    for out in (found, plain(x)):
        out.square().sum().backward()
    same_grads(module, plain)


class Shares(torch.nn.Module):
    """Returns what it saves, too."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return torch.sigmoid(self.inner(x).exp())


def test_hooks_around_a_settled_call_see_parameters_and_results_alone(setting):
    graphed, module, plain = graphed_twins(setting, Shares())
    x, seen = setting.randn(4, 8, grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        found = graphed(x)
    known = [*module.parameters(), found]
    assert {t.data_ptr() for t in seen} <= {t.data_ptr() for t in known}
    assert found.data_ptr() in [t.data_ptr() for t in seen]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graphed(x).mul_(2).sum().backward()
    for out in (found, plain(x)):
        out.square().sum().backward()
    same_grads(module, plain)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_recorded_while_anomalies_are_looked_for(setting):
    module, plain = twins(setting, net())
    x = setting.randn(4, 8, grad=True)
    with torch.autograd.detect_anomaly():
        graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
        assert torch.is_anomaly_enabled()
        check(setting, graphed, plain)
        with pytest.raises(RuntimeError, match="nan values"):
            graphed(x).mul(0).sqrt().mul(0).sum().backward()


class Saved(torch.autograd.Function):
    """Its gradient is what it saved, whatever it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


def test_a_gradient_that_is_a_saved_tensor_is_its_receivers(setting):
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(Saved.apply, (x,))
    for _ in range(2):
        loss = graphed(x)
        torch.autograd.grad(loss, x, retain_graph=True)[0].zero_()
        (found,) = torch.autograd.grad(loss, x)
        graphed(x)
        same(found, x.exp())


def test_gradients_that_lie_where_saved_tensors_were_are_no_copies():
    setting = Setting("simulated", torch.device("cpu"))
    layers = torch.nn.Sequential(*(net(64) for _ in range(4)))  # saved tensors of a weight's size
    loss = setting.graphed(layers, (torch.randn(64, 64),))(torch.randn(64, 64)).sum()
    with torch.profiler.profile() as seen:
        loss.backward()
    names = {event.key for event in seen.key_averages()}
    assert "aten::gelu_backward" in names
    assert "aten::clone" not in names
