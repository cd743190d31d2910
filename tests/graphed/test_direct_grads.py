"""`parameter_grads="direct"`: the callable adds gradients to `.grad` itself; the numbers are those of autograd's nodes."""

import pytest
import torch

from tests.graphed.steps import net, same, same_grads, step, twins


@pytest.fixture
def pair(setting):
    module, plain = twins(setting, net())
    sample = setting.randn(4, 8, grad=True)
    return setting.graphed(module, (sample,), parameter_grads="direct"), module, plain


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_with_accumulation(setting, pair, set_to_none):
    graphed, module, plain = pair
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain)]
    for _ in range(4):
        for _ in range(3):
            x = setting.randn(4, 8, grad=True)
            for a, b in zip(step(graphed, x)[1], step(plain, x)[1], strict=True):
                same(a, b)
        same_grads(module, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        same(a, b)


def test_gradients_that_are_kept_keep_their_values(setting, pair):
    graphed, module, _ = pair
    step(graphed, setting.randn(4, 8, grad=True))
    kept = [p.grad for p in module.parameters()]
    before = [grad.clone() for grad in kept]
    module.zero_grad()
    step(graphed, setting.randn(4, 8, grad=True))
    for grad, value, parameter in zip(kept, before, module.parameters(), strict=True):
        same(grad, value)
        assert not torch.equal(parameter.grad, value)


def test_named_inputs_leave_parameters_alone(setting, pair):
    graphed, module, plain = pair
    x = setting.randn(4, 8, grad=True)
    (found,) = torch.autograd.grad(graphed(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(plain(x).square().sum(), x)
    same(found, wanted)
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(graphed(x).square().sum(), module[0].weight)


def triple(parameter):
    parameter.grad.mul_(3)


def test_parameters_with_hooks_are_autograds(setting, pair):
    graphed, module, plain = pair
    for m in (module, plain):
        m[0].weight.register_hook(lambda grad: grad * 2)
        m[3].bias.register_post_accumulate_grad_hook(triple)
    x = setting.randn(4, 8, grad=True)
    step(graphed, x)
    step(plain, x)
    same_grads(module, plain)


def test_frozen_parameters_get_none(setting, pair):
    graphed, module, plain = pair
    for m in (module, plain):
        m[0].requires_grad_(False)
    x = setting.randn(4, 8, grad=True)
    step(graphed, x)
    step(plain, x)
    same_grads(module, plain)
    assert module[0].weight.grad is None


def test_anomalies_in_parameters_gradients_are_found(setting, pair):
    graphed, _, _ = pair
    x = setting.randn(4, 8)
    with torch.autograd.set_detect_anomaly(True):
        y = graphed(x)
        with pytest.raises(RuntimeError, match="GraphedBackward"):
            y.backward(torch.full_like(y, torch.nan))


def test_another_dtype_of_grad_is_kept(setting, pair):
    graphed, module, plain = pair
    for m in (module, plain):
        m[0].weight.grad_dtype = torch.float64
    x = setting.randn(4, 8, grad=True)
    step(graphed, x)
    step(plain, x)
    assert module[0].weight.grad.dtype == torch.float64
    same_grads(module, plain)
