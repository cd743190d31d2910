"""Tensors that a forward sets as attributes, which no replay does."""

import logging
import types

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
    "attribute": lambda: Scaled(by_attribute),
    "name": lambda: Scaled(by_name),
    "method": lambda: Scaled(lambda m: m.register_forward_pre_hook(Sets("scale").method)),
}


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


def test_a_graph_that_a_hook_leaves_does_not_know_the_leaf(setting):
    """Else its accumulator, made where it was captured, would be met by backwards of the user's."""
    module = setting.module(torch.nn.Sequential(HOOKED["spectral_norm"]()))
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    left = module[0].weight.grad_fn
    assert left is not None
    leaf = module[0].weight_orig
    known = torch.autograd.graph.get_gradient_edge(leaf).node
    reached, open_ = set(), [left]
    while open_:
        node = open_.pop()
        reached.add(node)
        open_ += [following for following, _ in node.next_functions if following is not None]
    assert known not in reached
    assert any(getattr(node, "variable", None) is leaf for node in reached)
    graphed(setting.randn(4, 8)).square().sum().backward()


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


class Fills(torch.nn.Module):
    """Leaves a tensor in an argument."""

    def __init__(self, way):
        super().__init__()
        self.inner = net()
        self.way = way

    def forward(self, x, into):
        y = self.inner(x)
        self.way(into, y)
        return y


@pytest.mark.parametrize(
    ("way", "into", "name"),
    [
        (lambda into, y: into.append(y), [], "argument 1[0]"),
        (lambda into, y: into[0].update(aux=y.mean()), [{}], "argument 1[0]['aux']"),
        (lambda into, y: into.update(x=y), {"x": torch.ones(1)}, "argument 1['x']"),
    ],
)
def test_tensors_that_a_forward_puts_into_arguments_are_warned_about(
    setting, way, into, name, caplog
):
    into = torch.utils._pytree.tree_map(setting.module, into)
    module = setting.module(Fills(way))
    with caplog.at_level(logging.WARNING):
        setting.graphed(module, (setting.randn(4, 8), into))
    (message,) = warnings(caplog)
    assert message.startswith(f"Fills puts a tensor into {name} when it runs, which no replay")
    assert message.endswith("return the tensor.")


def test_arguments_that_are_read_or_rearranged_are_no_trouble(setting, caplog):
    def fn(x, batch):
        batch["again"] = batch.pop("y")
        batch["number"] = 3
        return x + batch["again"]

    with caplog.at_level(logging.WARNING):
        graphed = setting.graphed(fn, (setting.randn(3), {"y": setting.randn(3)}))
    x, y = setting.randn(3), setting.randn(3)
    assert torch.equal(graphed(x, {"y": y}), x + y)
    assert warnings(caplog) == []


LOSSES = []
LAST = None


def into_global_name(module):
    def fn(x):
        global LAST
        LAST = module(x)
        return LAST + 1

    return fn


def into_nonlocal_name(module):
    last = None

    def fn(x):
        nonlocal last
        last = module(x)
        return last + 1

    return fn


class Router:
    last = None


def into_class(module):
    def fn(x):
        Router.last = module(x)
        return Router.last + 1

    return fn


def by_helper(module):
    helper = into_global_name(module)
    return lambda x: helper(x)


def into_global(module):
    def fn(x):
        y = module(x)
        LOSSES.append(y.mean())
        return y

    return fn


def into_closure(module):
    found = {"last": None}

    def fn(x):
        found["last"] = module(x)
        return found["last"] + 1

    return fn


def into_object(module):
    state = types.SimpleNamespace(aux=None)

    def fn(x):
        y = module(x)
        state.aux = y.mean()
        return y

    return fn


class Runner:
    def __init__(self, module):
        self.module = module

    def run(self, x):
        self.aux = self.module(x)
        return self.aux.sin()


def into_hooks_list(module):
    inputs = []
    module[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    return module


@pytest.mark.parametrize(
    ("way", "where"),
    [
        (into_global, "a list that it reaches"),
        (into_closure, "the dict 'found'"),
        (into_object, "an attribute of the SimpleNamespace 'state'"),
        (lambda module: Runner(module).run, "an attribute of a Runner that it reaches"),
        (into_hooks_list, "a list that it reaches"),
        (into_global_name, "the global 'LAST'"),
        (by_helper, "the global 'LAST'"),
        (into_nonlocal_name, "the nonlocal 'last'"),
        (into_class, "an attribute of class Router"),
    ],
)
def test_tensors_left_where_a_callable_reaches_are_warned_about(setting, way, where, caplog):
    fn = way(setting.module(net()))
    with caplog.at_level(logging.WARNING):
        setting.graphed(fn, (setting.randn(4, 8),))
    LOSSES.clear()
    (message,) = warnings(caplog)
    assert f" puts a tensor into {where} when it runs" in message


def test_names_that_only_a_first_run_assigns_are_no_trouble(setting, caplog):
    first = None

    def fn(x):
        nonlocal first
        if first is None:
            first = torch.ones_like(x)
        return x * first

    with caplog.at_level(logging.WARNING):
        setting.graphed(fn, (setting.randn(3),))
    assert warnings(caplog) == []
