"""Graphed modules that are copied, pickled, compiled, or graphed a second time."""

import copy
import pickle

import pytest
import torch

import cgpass
from tests.graphed.steps import check, graphed_twins, net, same, same_grads, step, twins


class WithDeepcopy(torch.nn.Linear):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            object.__setattr__(new, name, copy.deepcopy(value, memo))
        return new


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, copy.copy])
@pytest.mark.parametrize("make", [net, lambda: WithDeepcopy(8, 8)])
def test_copies_and_pickles_know_no_graphs(setting, duplicate, make):
    module = setting.module(make())
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    other = duplicate(graphed)
    assert type(other) is type(module)
    assert not hasattr(other, "graphed")
    assert not hasattr(other, "reset")
    x = setting.randn(4, 8)
    same(other(x), graphed(x))
    if duplicate is not copy.copy:
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
        assert not torch.equal(other(x), graphed(x))
    assert graphed.graphed.stats.replays >= 1


def renewed(module):
    other = type(module).__new__(type(module))
    vars(other).update(vars(module))  # as DataParallel makes replicas
    other._modules = {name: copy.deepcopy(inner) for name, inner in module.named_children()}
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module[:2],
        lambda module: type(module)(torch.nn.Linear(8, 8), torch.nn.Tanh()),
        renewed,
    ],
)
def test_other_modules_of_its_class_are_others(setting, change):
    graphed, module, plain = graphed_twins(setting, net(), grad=False)
    other = setting.module(change(graphed))
    expected = setting.module(change(plain))
    expected.load_state_dict(other.state_dict())
    with torch.no_grad():
        for p in [*other.parameters(), *expected.parameters()]:
            p.mul_(2)
    x = setting.randn(4, 8)
    same(step(other, x)[0], step(expected, x)[0])
    same_grads(other, expected)
    assert graphed.graphed.stats.calls == 0
    same(graphed(x), module(x))
    assert graphed.graphed.stats.replays == 1


def doubled(x):
    return x * 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_of_a_graphed_function_is_the_function(setting, duplicate):
    graphed = setting.graphed(doubled, (setting.randn(3),))
    assert duplicate(graphed) is doubled


def test_graphed_for_a_second_sample(setting):
    module, plain = twins(setting, net())
    first = setting.graphed(module, (setting.randn(4, 8),))
    second = setting.graphed(first, (setting.randn(2, 8),))
    for graphed, length in ((first, 4), (second, 2)):
        check(setting, graphed, plain, shape=(length, 8), grad=False)
        assert graphed.graphed.stats.replays == 2
    assert not hasattr(copy.deepcopy(second), "graphed")


def test_a_module_compiled_in_place_is_refused(setting):
    module, plain = twins(setting, net())
    x = setting.randn(4, 8)
    graphed = setting.graphed(torch.compile(module, backend="aot_eager"), (x,))
    same(graphed(x), plain(x))
    assert graphed.graphed.stats.replays == 1
    torch.compiler.reset()
    module.compile(backend="aot_eager")
    with pytest.raises(cgpass.errors.GraphedArgumentError, match="was compiled in place"):
        setting.graphed(module, (x,))


def test_methods_of_a_modules_own_are_left_alone(setting):
    class Counts(torch.nn.Linear):
        def reset(self):
            return "its own"

    graphed = setting.graphed(setting.module(Counts(8, 8)), (setting.randn(4, 8),))
    assert graphed.reset() == "its own"
    graphed.graphed.reset()
    assert not graphed.graphed._pairs


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.reset, self.graphed = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.graphed(x) * self.reset(x).sigmoid()


def test_members_with_the_names_of_methods_are_there(setting):
    graphed = setting.graphed(setting.module(Gated()), (setting.randn(2, 4),))
    assert graphed.reset.weight.shape == graphed.graphed.weight.shape
    graphed.close()


class Forwards(torch.nn.Module):
    """Offers what its inner module does."""

    def __init__(self):
        super().__init__()
        self.inner = Gated()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


def test_members_that_are_forwarded_are_there(setting):
    graphed = setting.graphed(setting.module(Forwards()), (setting.randn(2, 4),))
    assert graphed.reset is graphed.inner.reset
    assert graphed.graphed.stats.recordings
