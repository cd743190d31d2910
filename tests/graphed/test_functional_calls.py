"""Calls with parameters that are not the module's own, which has its own again when the backward comes."""

import gc
import weakref

import pytest
import torch
from torch.func import functional_call

from tests.graphed.steps import net, same, same_grads, twins


def leaves(module, seed):
    torch.manual_seed(seed)
    return {
        name: torch.randn_like(p).requires_grad_(p.requires_grad)
        for name, p in module.named_parameters()
    }


def compare(setting, graphed, plain, given, wanted):
    x = setting.randn(4, 8)
    found, expected = functional_call(graphed, given, (x,)), functional_call(plain, wanted, (x,))
    same(found, expected)
    return found, expected


@pytest.mark.parametrize("max_rerecords", [0, 2, 128])
def test_other_leaves(setting, max_rerecords):
    module, plain = twins(setting, net())
    for each in (module, plain):
        each[0].weight.requires_grad_(False)
    graphed = setting.graphed(module, (setting.randn(4, 8),), max_rerecords=max_rerecords)
    kept = []
    for number in range(4):
        given, wanted = leaves(module, number), leaves(module, number)
        kept.append((given, wanted))
        for out in compare(setting, graphed, plain, given, wanted):
            out.square().sum().backward()
        for a, b in zip(given.values(), wanted.values(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                same(a.grad, b.grad)
        x = setting.randn(4, 8)
        for each in (graphed, plain):
            each(x).square().sum().backward()
        same_grads(module, plain)
    stats = graphed.graphed.stats
    assert stats.rerecordings == min(max_rerecords, 4)
    assert stats.plain_calls == 4 - stats.rerecordings


def test_computed_parameters(setting, caplog):
    module, plain = twins(setting, net())
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    scales = [torch.full((), 2.0, device=setting.device, requires_grad=True) for _ in range(2)]
    for _ in range(3):
        given, wanted = (
            {name: p * scale for name, p in each.named_parameters()}
            for each, scale in zip((module, plain), scales, strict=True)
        )
        for out in compare(setting, graphed, plain, given, wanted):
            out.square().sum().backward()
    same(scales[0].grad, scales[1].grad)
    same_grads(module, plain)
    stats = graphed.graphed.stats
    assert (stats.plain_calls, stats.rerecordings) == (3, 0)
    assert caplog.text.count("or parameters are computed") == 1


@pytest.mark.parametrize("backward", [True, False])
def test_parameters_are_held_until_the_backward_is_done(setting, backward):
    module = setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    given = {name: p.detach() for name, p in leaves(module, 0).items()}
    ref = weakref.ref(given["0.weight"])
    out = functional_call(graphed, given, (setting.randn(4, 8, grad=True),))
    del given
    assert ref() is not None
    if backward:
        out.square().sum().backward()
        gc.collect()
        assert ref() is None
