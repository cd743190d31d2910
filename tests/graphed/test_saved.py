"""Values saved for a backward, and read by it, while a callable is recorded."""

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from cgpass.graphed.differentiated import Differentiated
from tests.graphed.steps import (
    check,
    clear_grads,
    graphed_twins,
    move,
    net,
    same,
    same_grads,
    twins,
)
from tests.graphed.test_orders import check as check_order


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
    def __init__(self, device, *, asks):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, device=device))
        self.weight.main_grad = torch.zeros(4, 4, device=device)
        if asks:
            self.weight.grad_added_to_main_grad = False

    def forward(self, x):
        return Fused.apply(x, self.weight)


@pytest.mark.parametrize("asks", [False, True])
def test_fused_gradient_accumulation(setting, asks):
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        module, fired = FusedLinear(setting.device, asks=asks), []
        sample, xs = setting.randn(2, 4, grad=True), [setting.randn(2, 4) for _ in range(3)]
        fn = setting.graphed(module, (sample,)) if graphed else module
        module.weight.main_grad.zero_()
        module.weight.register_post_accumulate_grad_hook(fired.append)
        for x in xs:
            x.requires_grad_()
            fn(x).sum().backward()
        found.append((module.weight.main_grad, *[x.grad for x in xs], len(fired)))
    for plain, now in zip(*found, strict=True):
        if isinstance(plain, int):
            assert plain == now == 3
        else:
            same(now, plain)


def test_another_tensor_to_add_gradients_to(setting):
    module = FusedLinear(setting.device, asks=False)
    graphed = setting.graphed(module, (setting.randn(2, 4, grad=True),))
    x, first = setting.randn(2, 4, grad=True), module.weight.main_grad
    want = torch.ones(4, 2, device=setting.device) @ x.detach()
    for place in (first, torch.zeros_like(first), first):
        module.weight.main_grad = place.zero_()
        for _ in range(2):
            graphed(x).sum().backward()
        torch.testing.assert_close(place, 2 * want)
    stats = graphed.graphed.stats
    assert (stats.rerecordings, stats.plain_calls) == (0, 2)


CHECKPOINTS = {
    "ours": cgpass.checkpoint,
    "torch's": functools.partial(torchs, use_reentrant=False),
    "torch's, to its end": functools.partial(torchs, use_reentrant=False, early_stop=False),
}


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recorded_again_in_a_checkpoint(setting, way, dropout):
    module, plain = twins(setting, net(dropout=dropout))
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for _ in range(3):
        move(module, plain)
        check(setting, *(functools.partial(CHECKPOINTS[way], fn) for fn in (graphed, plain)))
        same_grads(module, plain)
    assert graphed.graphed.stats.rerecordings == 3


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
    module, plain = twins(setting, Shares())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
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


# ---- tensors that a forward keeps in other ways than operators do


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


class Applies(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.inner, self.fn = net(), fn

    def forward(self, x):
        self.left = self.fn(self.inner(x) + x)
        return self.fn(self.left)


def gated(x):
    return torch.tanh(x) * torch.sigmoid(x)


WAYS = {
    "attributes": Keeps.apply,
    "asked for twice": AsksTwice.apply,
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
        check_order(setting, [(module, plain)], [(graphed, plain)] * 3, order)
    assert graphed.graphed.stats.plain_calls == 0


def moved():
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)


@pytest.mark.parametrize(
    "around", [torch.autograd.graph.save_on_cpu, moved, contextlib.nullcontext]
)
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
        check_order(setting, [(module, plain)], [(fn, plain) for fn in graphed], order)
    assert all(fn.stats.plain_calls == fn.stats.rerecordings == 0 for fn in graphed)


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
    x = setting.randn(4, grad=True)
    graphed = setting.graphed(lambda x: (x * x).sin(), (x,))
    run = Differentiated(graphed, (), warms_up=False)
    run.forward([x])
    refs = [
        torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in run.separate()
    ]
    assert [ref.expired() for ref in refs] == [True, True]
