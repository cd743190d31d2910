"""Recording while a forward is pending: its backward runs as if nothing had happened."""

import pytest
import torch
from torch.func import functional_call

from tests.graphed.steps import same, same_grads, twins


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(1.0)  # counted as a change, though the value is the same
        return self.last(self.norm(self.first(x)).relu() * self.scale.clone())


def unfreeze(module, fn, xs):
    module.first.requires_grad_(False)
    one = fn(xs[0]).sum()
    module.first.requires_grad_(True)
    (one + fn(xs[1]).sum()).backward()


def other_parameters(module, fn, xs):
    own = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    (fn(xs[0]).sum() + functional_call(fn, own, (xs[1],)).sum()).backward()
    for name, parameter in module.named_parameters():
        parameter.grad += own[name].grad


@pytest.mark.parametrize("way", [unfreeze, other_parameters])
def test_a_recording_leaves_pending_backwards_alone(setting, way):
    module, plain = twins(setting, Normed())
    graphed = setting.graphed(module, (setting.randn(8, 4),))
    for _ in range(2):
        xs = [setting.randn(8, 4) for _ in range(2)]
        for each, fn in ((module, graphed), (plain, plain)):
            way(each, fn, xs)
        same_grads(module, plain)
        for found, expected in zip(module.buffers(), plain.buffers(), strict=True):
            same(found, expected)
    assert graphed.graphed.stats.plain_calls == 0
