"""Helpers of the tests of graphed callables: modules, steps, comparisons."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cgpass


@dataclass(frozen=True)
class Setting:
    """A driver and its device."""

    driver: str
    device: torch.device

    def options(self, **options):
        return cgpass.GraphedOptions(**{"driver": self.driver, **options})

    def graphed(self, callables, sample_args, sample_kwargs=None, modules=(), **options):
        return cgpass.make_graphed_callables(
            callables,
            sample_args,
            sample_kwargs=sample_kwargs,
            modules=modules,
            options=self.options(**options),
        )

    def randn(self, *shape, grad=False):
        return torch.randn(*shape, device=self.device).requires_grad_(grad)

    def module(self, module):
        return module.to(self.device)


class Layer(torch.nn.Module):
    """Attention and a feed-forward net, with dropout."""

    def __init__(self, width=8, dropout=0.0, checkpoint=None):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.dropout = dropout
        self.checkpoint = checkpoint

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        weights = F.dropout(weights, self.dropout, self.training)
        return x + self.out(weights @ v)

    def feed(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)

    def forward(self, x):
        if self.checkpoint is None:
            return self.feed(self.attend(x))
        return self.checkpoint(self.feed, self.checkpoint(self.attend, x))


def net(width=8, dropout=0.0):
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(width, width),
    )


def twins(setting, module):
    """A module and a copy of it with parameters of its own."""
    module = setting.module(module)
    return module, copy.deepcopy(module)


def graphed_twins(setting, module, *, grad=True, **options):
    """A graphed module, the module itself and a copy of it."""
    module, plain = twins(setting, module)
    sample = (setting.randn(4, 8, grad=grad),)
    return setting.graphed(module, sample, **options), module, plain


def same(found, expected):
    """Bit for bit the same: tensors, None, or sequences of these."""
    if isinstance(found, (list, tuple)):
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif found is None or expected is None:
        assert found is expected
    else:
        assert torch.equal(found, expected), (found - expected).abs().max()


def same_grads(found, expected):
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        same(a.grad, b.grad)


def clear_grads(*modules):
    for module in modules:
        module.zero_grad(set_to_none=True)


def step(fn, *args, **kwargs):
    """Forward and backward with a seed of its own; the output and the arguments' gradients."""
    torch.manual_seed(7)
    args = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]
    out = fn(*args, **kwargs)
    (out * out).sum().backward()
    return out.detach(), [a.grad for a in args if isinstance(a, torch.Tensor)]


def check(setting, found, expected, calls=1, *, shape=(4, 8), grad=True, **kwargs):
    """Steps of a module, or of a function, and of its twin have the same results and gradients."""
    for _ in range(calls):
        x = setting.randn(*shape, grad=grad)
        same(step(found, x, **kwargs), step(expected, x, **kwargs))
        if isinstance(found, torch.nn.Module):
            same_grads(found, expected)


def move(*modules):
    """Have parameters lie elsewhere."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
