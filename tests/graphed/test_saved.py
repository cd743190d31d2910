"""Values saved for a backward, and read by it, while a callable is recorded."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from tests.graphed.steps import check, graphed_twins, move, net, same, same_grads, twins


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
    assert (stats.rerecordings, stats.plain_calls) == (1, 0)


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
