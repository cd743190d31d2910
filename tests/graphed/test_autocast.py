"""Autocast around calls, off in parts of a callable, of another dtype there; backwards have the numbers of none."""

import contextlib

import pytest
import torch

import cgpass
from tests.graphed.steps import Layer, check, same, same_grads, twins


class Island(torch.nn.Module):
    """A layer, and a router that computes in float32 whatever is around it."""

    def __init__(self, **settings):
        super().__init__()
        self.layer, self.router = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.settings = settings

    def forward(self, x):
        h = self.layer(x)
        with torch.autocast(x.device.type, **self.settings):
            return self.router(h.float() if not self.settings.get("enabled", True) else h)


class Solve(torch.nn.Module):
    """Its operator is not cast, but the products in the operator's derivative would be."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8) * 2 + torch.rand(8, 8))

    def forward(self, x):
        return torch.linalg.solve_triangular(self.weight, x, upper=False)


OUTSIDE = contextlib.nullcontext()


def casts(setting, dtype=torch.bfloat16):
    return torch.autocast(setting.device.type, dtype)


def made(setting, module, shape=(8, 8)):
    """A module graphed under autocast, and its twin."""
    module, plain = twins(setting, module)
    with casts(setting):
        return setting.graphed(module, (setting.randn(*shape, grad=True),)), plain


def stepped(call, x, forward, backward=OUTSIDE):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with forward:
        out = call(x)
    loss = out.float().square().sum()
    with backward:
        loss.backward()
    return out, x.grad


@pytest.mark.parametrize(
    "module",
    [
        lambda: Island(enabled=False),
        lambda: Island(dtype=torch.float16),
        Solve,
        lambda: Layer(dropout=0.1),
        lambda: Layer(dropout=0.1, checkpoint=cgpass.checkpoint),
    ],
    ids=["off inside", "another dtype inside", "derivative", "layer", "checkpoints"],
)
def test_parts_have_settings_of_their_own(setting, module):
    graphed, plain = made(setting, module())
    for _ in range(3):
        x = setting.randn(8, 8)
        for found, expected in zip(
            stepped(graphed, x, casts(setting)), stepped(plain, x, casts(setting)), strict=True
        ):
            same(found, expected)
        same_grads(graphed, plain)
    assert graphed.graphed.stats.plain_calls == 0


def test_recorded_again_within_a_block(setting, caplog):
    graphed, plain = made(setting, Solve())
    for module in (graphed, plain):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    x = setting.randn(8, 8)
    for _ in range(2):
        with casts(setting):
            stepped(graphed, x, OUTSIDE)
        stepped(plain, x, casts(setting))
        same_grads(graphed, plain)
    assert graphed.graphed.stats.recordings > 1
    check(setting, graphed, plain, 2, shape=(8, 8))
    assert caplog.text.count("autocast, or the fork of its rng_tracker, is another") == 1
