"""Modules whose `forward` was replaced on the instance: what is returned runs it in its own mode."""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F

from tests.graphed.steps import same


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)


def with_dropout(self, x):
    return F.dropout(self.inner(x), 0.5, self.training)


def by_method(block):
    block.forward = types.MethodType(with_dropout, block)


def by_partial(block):
    block.before = types.MethodType(with_dropout, block)

    def forward(module, *args, **kwargs):
        return module.before(*args, **kwargs) + F.dropout(args[0], 0.5, module.training)

    block.forward = functools.update_wrapper(functools.partial(forward, block), block.forward)


def by_closure(block):
    before = block.forward

    def forward(x):
        return F.dropout(before(x), 0.5, block.training)

    block.forward = forward


WAYS = [by_method, by_partial, by_closure]


def models(setting, way, *, train=True, **options):
    """A model whose block is graphed, and one that is not."""
    block = setting.module(Block()).train(train)
    plain = copy.deepcopy(block)
    way(block)
    way(plain)
    graphed = setting.graphed(block, (setting.randn(4, 8),), **options)
    return block, torch.nn.Sequential(graphed), torch.nn.Sequential(plain)


def check(setting, model, plain, mode):
    model.train(mode)
    plain.train(mode)
    x = setting.randn(4, 8)
    torch.manual_seed(3)
    found = model(x)
    torch.manual_seed(3)
    same(found, plain(x))


@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_mode_is_that_of_what_is_returned(setting, way, recorded, patch):
    block, model, plain = models(setting, way, train=recorded, patch_modules=patch)
    for mode in (not recorded, recorded, not recorded):
        check(setting, model, plain, mode)
        assert block.training is (mode if patch else recorded)
    assert model[0].graphed.stats.replays == 1
    again = torch.nn.Sequential(setting.graphed(model[0], (setting.randn(4, 8),)))
    for mode in (recorded, not recorded):
        check(setting, again, plain, mode)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_recorded(setting, way):
    _, model, plain = models(setting, way, driver="none")
    for mode in (False, True):
        check(setting, model, plain, mode)


@pytest.mark.parametrize("way", [by_method, by_partial])
def test_a_copy_has_its_own_parameters_and_mode(setting, way):
    _, model, plain = models(setting, way)
    other, wanted = copy.deepcopy(model), copy.deepcopy(plain)
    for each in (model, plain):
        with torch.no_grad():
            each[0].inner.weight.zero_()
    for mode in (False, True):
        check(setting, other, wanted, mode)
        check(setting, model, plain, mode)


def test_the_mode_of_the_original_comes_back_after_an_error(setting):
    block = setting.module(Block())

    def forward(x):
        if not block.training:
            raise KeyError("mine")
        return block.inner(x)

    block.forward = forward
    graphed = setting.graphed(block, (setting.randn(4, 8),)).eval()
    with pytest.raises(KeyError, match="mine"):
        graphed(setting.randn(4, 8))
    assert block.training
