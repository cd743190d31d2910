"""Gradients of convolutions lie as their weights do, whatever layout Inductor computes in."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


class Convolutions(nn.Module):
    """Of so many channels that Inductor computes it channels-last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(72, 80, 3, padding=1)
        self.point = nn.Conv2d(80, 80, 1)
        self.second = nn.Conv2d(80, 72, 3, padding=1)

    def forward(self, x):
        return self.second(self.point(self.first(x).relu()).relu())


def gradients(call, parameters, x):
    return torch.autograd.grad(call(x).square().sum(), parameters)


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_lie_as_weights(setting, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = {}

    def program(session):
        module, call = session.compiled(lambda: Convolutions().to(memory_format=layout))
        x = session.randn(2, 72, 8, 8).to(memory_format=layout)
        parameters = list(module.parameters())
        for _ in range(4):
            found["ours"] = gradients(call, parameters, x)
        found["default"] = gradients(torch.compile(module), parameters, x)
        found["weights"] = parameters
        return [grad.clone() for grad in found["ours"]]

    setting.run(program, compiler="inductor")
    for ours, default, weight in zip(*found.values(), strict=True):
        assert ours.stride() == weight.stride()
        assert torch.equal(ours, default)
    differ = any(
        g.stride() != w.stride() for g, w in zip(found["default"], found["weights"], strict=True)
    )
    assert differ is not channels_last, "what is tested here is there no more"


def test_autograd_copies_no_gradient(setting):
    copied = []

    def program(session):
        module, call = session.compiled(Convolutions)
        x = session.randn(2, 72, 8, 8)
        for _ in range(6):
            loss = call(x).square().sum()
            module.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
                loss.backward()
            copied.append([e for e in profiled.events() if e.name == "aten::new_empty_strided"])
        return [p.grad.clone() for p in module.parameters()]

    for a, b in zip(
        setting.run(program, compiler="inductor"), setting.run_eagerly(program), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert not copied[5]
