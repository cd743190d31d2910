"""Gradients of convolutions lie as their weights do, whatever layout Inductor computes in."""

import pytest
import torch
from torch import nn


class Convolutions(nn.Module):
    """Of so many channels that Inductor computes it channels-last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(72, 80, 3, padding=1)
        self.point = nn.Conv2d(80, 80, 1)
        self.second = nn.Conv2d(80, 72, 3, padding=1)

    def forward(self, x):
        return self.second(self.point(self.first(x).relu()).relu())


def strides(tensor):
    """Of the dimensions in which there is more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def gradients(call, parameters, x):
    return torch.autograd.grad(call(x).square().sum(), parameters)


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_lie_as_weights(setting, monkeypatch, channels_last):
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

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    setting.run(program, compiler="inductor")
    for ours, default, weight in zip(*found.values(), strict=True):
        assert strides(ours) == strides(weight)
        assert torch.equal(ours, default)
    differ = any(
        strides(g) != strides(w) for g, w in zip(found["default"], found["weights"], strict=True)
    )
    assert differ is not channels_last, "what is tested here is there no more"
