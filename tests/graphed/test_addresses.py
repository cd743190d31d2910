"""Parameters and buffers that move, are replaced, leave, or are given for one call."""

import gc
import logging
import weakref

import pytest
import torch
from torch.func import functional_call

from tests.graphed.steps import check, graphed_twins, move, net, same, same_grads, twins


def test_moved_parameters_are_recorded_again(setting, caplog):
    module, plain = twins(setting, net(dropout=0.3))
    counts = []
    hooks = {"pre_forward": lambda *args: counts.append(1)}
    graphed = setting.graphed(
        module, (setting.randn(4, 8, grad=True),), num_warmup_iters=2, capture_time_hooks=[hooks]
    )
    assert len(counts) == 3
    check(setting, graphed, plain)
    move(module)
    with torch.no_grad():
        for each in (module, plain):
            each[0].weight.mul_(0.5)
    with caplog.at_level(logging.INFO, "cgpass"):
        check(setting, graphed, plain)
    assert "recorded again: parameters or buffers moved" in caplog.text
    for _ in range(2):
        check(setting, graphed, plain)
    stats = graphed.graphed.stats
    assert (stats.rerecordings, stats.recordings, stats.plain_calls) == (1, 4, 0)
    assert len(counts) == 5


def test_a_set_of_addresses_that_comes_back_replays_at_once(setting):
    graphed, module, plain = graphed_twins(setting, net())
    homes = [[p.data for p in module.parameters()], [p.data.clone() for p in module.parameters()]]
    for k in (0, 1, 0, 1, 1, 0):
        for p, home in zip(module.parameters(), homes[k], strict=True):
            p.data = home
        check(setting, graphed, plain)
    assert graphed.graphed.stats.recordings == 4


def test_past_the_limit_calls_run_plainly(setting, caplog):
    graphed, module, plain = graphed_twins(setting, net(), max_rerecords=1)
    for _ in range(4):
        check(setting, graphed, plain)
        move(module)
    stats = graphed.graphed.stats
    assert (stats.rerecordings, stats.plain_calls) == (1, 2)
    assert caplog.text.count("it was recorded again as often as max_rerecords allows") == 1
    graphed.reset()
    for _ in range(2):
        check(setting, graphed, plain)
        move(module)
    assert (stats.rerecordings, stats.plain_calls) == (2, 2)


def test_a_parameter_that_is_removed_is_no_longer_there(setting, caplog):
    graphed, module, plain = graphed_twins(setting, torch.nn.Linear(8, 8))
    for each in (module, plain):
        each.bias = None
    check(setting, graphed, plain)
    assert graphed.graphed.stats.plain_calls == 1
    assert "a parameter or buffer was removed" in caplog.text
    graphed.reset()
    check(setting, graphed, plain)
    assert graphed.graphed.stats.plain_calls == 1
    x = setting.randn(4, 8)
    weights = module.weight, plain.weight
    pending = graphed(x), plain(x)
    for each, out in zip((module, plain), pending, strict=True):
        each.weight.grad = None
        del each.weight
        out.square().sum().backward()
    same(weights[0].grad, weights[1].grad)
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        graphed(setting.randn(4, 8))


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
        same([p.grad for p in given.values()], [p.grad for p in wanted.values()])
        check(setting, graphed, plain, grad=False)
    stats = graphed.graphed.stats
    assert stats.rerecordings == min(max_rerecords, 4)
    assert stats.plain_calls == 4 - stats.rerecordings


def test_computed_parameters(setting, caplog):
    graphed, module, plain = graphed_twins(setting, net(), grad=False)
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
    assert caplog.text.count("parameters are computed in each call") == 1


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
