"""Tensors that a forward sets as attributes, which no replay does."""

import logging

import pytest
import torch
from torch.nn.utils import prune

from tests.graphed.steps import check, net, same_grads


class Stashes(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner = net()
        self.way = way
        self.found = []
        self.seen = {"last": None}
        self.aux = self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(8, device=x.device)
        y = self.inner(x) * self.table
        self.way(self, y)
        return y


def as_attribute(module, y):
    module.aux = y.square().mean()


def in_list(module, y):
    module.found.append(y.detach())


def in_dict(module, y):
    module.seen["last"] = y


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if "puts a tensor" in each.getMessage()]


@pytest.mark.parametrize(
    ("way", "name"), [(as_attribute, "aux"), (in_list, "found"), (in_dict, "seen")]
)
def test_tensors_that_a_forward_sets_as_attributes_are_warned_about(setting, way, name, caplog):
    module = setting.module(torch.nn.Sequential(Stashes(way)))
    sample = (setting.randn(4, 8),)
    with caplog.at_level(logging.WARNING):
        setting.graphed((module,), (sample, sample), order=(1, 1, -1, -1))
    (message,) = warnings(caplog)
    assert message.startswith(
        f"callable 0 (Sequential) puts a tensor into 0.{name} of Sequential when it runs"
    )
    assert message.endswith("don't read it there, return it.")


def drops_it_again(module, y):
    module.aux = y
    module.aux = None


def test_what_only_the_first_call_sets_or_is_gone_afterwards_is_no_trouble(setting, caplog):
    module = setting.module(Stashes(drops_it_again))
    with caplog.at_level(logging.WARNING):
        setting.graphed(module, (setting.randn(4, 8),), num_warmup_iters=1)
    assert warnings(caplog) == []


def by_attribute(module):
    def hook(each, args):
        each.scale = each.raw_scale.exp()

    module.register_forward_pre_hook(hook)


def by_name(module, name="scale"):
    def hook(each, args):
        setattr(each, name, each.raw_scale.exp())

    module.register_forward_pre_hook(hook)


class Sets:
    def __init__(self, name):
        self.name = name

    def method(self, module, args):
        setattr(module, self.name, module.raw_scale.exp())


class Scaled(torch.nn.Module):
    def __init__(self, way=None):
        super().__init__()
        self.raw_scale = torch.nn.Parameter(torch.zeros(8))
        self.aux = None
        if way is not None:
            way(self)

    def forward(self, x):
        return self.inner(x * self.scale)

    def inner(self, x):
        return x


class Leaves(Scaled):
    """Leaves a tensor besides."""

    def inner(self, x):
        self.aux = x.sum()
        return x


UTILS = torch.nn.utils
HOOKED = {
    "spectral_norm": lambda: UTILS.spectral_norm(torch.nn.Linear(8, 8)),
    "weight_norm": lambda: UTILS.weight_norm(torch.nn.Linear(8, 8)),
    "prune": lambda: prune.random_unstructured(torch.nn.Linear(8, 8), "weight", 0.5),
    "lstm": lambda: First(UTILS.weight_norm(torch.nn.LSTM(8, 8), "weight_hh_l0")),
    "attribute": lambda: Scaled(by_attribute),
    "name": lambda: Scaled(by_name),
    "method": lambda: Scaled(lambda m: m.register_forward_pre_hook(Sets("scale").method)),
}


class First(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_hooks_of_a_module_compute_before_it_runs_is_no_trouble(setting, kind, caplog):
    module = setting.module(torch.nn.Sequential(HOOKED[kind]()))
    state = {name: t.clone() for name, t in module.state_dict().items()}
    plain = setting.module(torch.nn.Sequential(HOOKED[kind]()))
    plain.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    assert warnings(caplog) == []
    check(setting, graphed, plain, setting.randn(4, 8, grad=True))
    same_grads(module, plain)
    assert graphed.graphed.stats.plain_calls == 0


def test_what_a_module_with_hooks_leaves_besides_is_warned_about(setting, caplog):
    module = setting.module(torch.nn.Sequential(Leaves(by_attribute)))
    with caplog.at_level(logging.WARNING):
        setting.graphed(module, (setting.randn(4, 8),))
    (message,) = warnings(caplog)
    assert "a tensor into 0.aux of Sequential" in message


def keeps_input(module, args):
    module.input = args[0].detach()


class ByName(torch.nn.Linear):
    """Reads what its hook makes through others."""

    @property
    def scaled(self):
        return getattr(self, "factor", 1) * self.weight

    def run(self, x):
        return torch.nn.functional.linear(x, self.scaled)

    def forward(self, x):
        return helper(self, x)


def helper(module, x):
    return module.run(x)


def makes_factor(module, args):
    module.factor = module.bias.exp()
    module.seen = module.factor + 1


@pytest.mark.parametrize(
    ("kind", "hook", "name"),
    [(torch.nn.Linear, keeps_input, "0.input"), (ByName, makes_factor, "0.seen")],
)
def test_what_hooks_keep_for_others_is_warned_about(setting, kind, hook, name, caplog):
    module = setting.module(torch.nn.Sequential(kind(8, 8)))
    module[0].register_forward_pre_hook(hook)
    with caplog.at_level(logging.WARNING):
        setting.graphed(module, (setting.randn(4, 8),))
    (message,) = warnings(caplog)
    assert f"puts a tensor into {name} of Sequential" in message
