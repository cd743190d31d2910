"""Modules whose `forward` was replaced on the instance: what is returned runs it in its own mode."""

import copy
import functools
import pickle
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


class Scaled(torch.nn.Linear):
    scale = 1.0
    shift = None

    def scaled(self, x):
        return x * self.scale

    def forward(self, x):
        out = self.scaled(super().forward(x))
        return out if self.shift is None else out + self.shift


def by_its_class(block):
    pass


def by_bound_method(block):
    block.forward = types.MethodType(type(block).forward, block)


def by_partial_of_it(block):
    block.forward = functools.partial(type(block).forward, block)


@pytest.mark.parametrize("patch", [False, True])
@pytest.mark.parametrize("way", [by_its_class, by_bound_method, by_partial_of_it])
def test_attributes_set_on_the_original_count_where_no_graph_runs(setting, way, patch):
    block, x = setting.module(Scaled(8, 8)), setting.randn(4, 8)
    block.shift = 1.0
    way(block)
    graphed = setting.graphed(block, (setting.randn(4, 8),), patch_modules=patch)
    block.eval()
    expected = F.linear(x, block.weight, block.bias)
    same(graphed(x), expected + 1)
    block.scale = 2.0
    same(graphed(x), expected * 2 + 1)
    del block.shift
    same(graphed(x), expected * 2)
    graphed.scale = 3.0  # stays until the original gets another one
    same(graphed(x), expected * 3)
    block.scaled = types.MethodType(lambda self, y: y * self.scale * 2, block)
    same(graphed(x), expected * 6)
    block.scale = 4.0
    same(graphed(x), expected * 8)
    assert graphed.graphed.stats.replays == 0


class Stateful(Scaled):
    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


def from_copy(graphed, x):
    return copy.deepcopy(graphed)(x)


def from_pickle(graphed, x):
    return pickle.loads(pickle.dumps(graphed))(x)


@pytest.mark.parametrize("taken", [from_copy, from_pickle])
def test_copies_have_what_was_set_on_the_original(setting, taken):
    block, x = setting.module(Stateful(8, 8)), setting.randn(4, 8)
    graphed = setting.graphed(block, (setting.randn(4, 8),))
    state = block.state_dict() | {"_extra_state": 2.0}
    block.load_state_dict(state)
    same(taken(graphed, x), F.linear(x, block.weight, block.bias) * 2)


def test_states_have_what_was_set_on_the_original(setting):
    block = setting.module(Stateful(8, 8))
    graphed = setting.graphed(block, (setting.randn(4, 8),))
    block.scale = 2.0
    assert torch.nn.Sequential(graphed).state_dict()["0._extra_state"] == 2.0
    graphed.load_state_dict(graphed.state_dict() | {"_extra_state": 3.0})
    assert graphed.state_dict()["_extra_state"] == 3.0
    block.scale = 4.0
    assert graphed.state_dict()["_extra_state"] == 4.0
    assert "state_dict" not in vars(copy.deepcopy(graphed))


def test_what_is_set_on_the_copy_later_counts(setting):
    block, x = setting.module(Scaled(8, 8)).eval(), setting.randn(4, 8)
    graphed = setting.graphed(block, (setting.randn(4, 8),)).train()
    block.scale = 2.0
    graphed.scale = 3.0
    expected = F.linear(x, block.weight, block.bias)
    same(graphed(x), expected * 3)
    graphed.state_dict()
    same(graphed(x), expected * 3)
    graphed.eval()
    assert graphed.graphed.stats.replays == 0


@pytest.mark.parametrize("way", [by_its_class, by_method])
def test_a_forward_set_on_the_original_later_counts_where_no_graph_runs(setting, way):
    block, x = setting.module(Block()), setting.randn(4, 8)
    way(block)
    graphed = setting.graphed(block, (setting.randn(4, 8),)).eval()
    same(graphed(x), block.inner(x))
    block.forward = types.MethodType(lambda self, x: self.inner(x) + self.training, block)
    same(graphed(x), block.inner(x))
    block.forward = lambda x: x * 2
    same(graphed(x), x * 2)
    assert graphed.graphed.stats.replays == 0
