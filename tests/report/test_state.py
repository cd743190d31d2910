"""What `cgpass.explain` puts back: modules and what they hold, arguments, gradients, optimizers, random numbers."""

import copy
import dataclasses
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import cgpass
from tests.report.test_explain import Model, X

pytestmark = pytest.mark.usefixtures("simulated")


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.history, self.recent = [torch.zeros(2)], deque([1], maxlen=2)
        self.cache, self.seen = {"first": torch.zeros(8)}, {3}
        self.counts = {"calls": {"all": [0]}}

    @torch.compiler.disable
    def note(self, x):
        self.history.append(x.detach())
        self.recent.append(2)
        self.cache["first"].add_(1)
        self.cache["last"] = x.detach()
        self.seen.clear()
        self.counts["calls"]["all"][0] += 1
        self.added = [x.detach()]

    def forward(self, x):
        self.note(x)
        return self.layer(x).sin().cos().exp()


def test_containers_that_a_module_holds():
    model = Collecting()
    names = ("history", "recent", "cache", "seen", "counts")
    before = [getattr(model, name) for name in names]
    first = model.cache["first"]
    cgpass.explain(model, X)
    assert all(getattr(model, name) is each for name, each in zip(names, before, strict=True))
    assert [len(model.history), list(model.recent), model.seen] == [1, [1], {3}]
    assert list(model.cache) == ["first"]
    assert model.cache["first"] is first
    assert not first.any()
    assert model.counts == {"calls": {"all": [0]}}
    assert not hasattr(model, "added")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable
    def noise(self, x):
        factor = np.random.rand() * random.random()
        return torch.randn(x.shape, generator=self.own) * factor + torch.randn(x.shape)

    def forward(self, x):
        return self.layer(x + self.noise(x))


def test_random_numbers_go_on_as_if_nothing_had_run():
    model = Noisy()
    states = [model.own.get_state(), torch.get_rng_state()]
    others = [str(np.random.get_state()), random.getstate()]
    cgpass.explain(model, X)
    now = [model.own.get_state(), torch.get_rng_state()]
    assert all(map(torch.equal, states, now))
    assert others == [str(np.random.get_state()), random.getstate()]


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))


@dataclasses.dataclass
class Config:
    model: nn.Module


class Slots:
    __slots__ = ("models",)

    def __init__(self, model):
        self.models = {"one": model}

    def run(self, config, x):
        return self.models["one"](x) + config.model(x)


class Reads(nn.Module):
    def forward(self, config, x):
        return config.model(x)


def kept(model):
    return {name: (value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}


def stayed(before, model):
    now = model.state_dict()
    return [
        name
        for name, (value, address) in before.items()
        if not torch.equal(value, now[name]) or now[name].data_ptr() != address
    ] == []


@pytest.mark.parametrize(
    ("fn", "hold"),
    [
        (lambda model, x: model(x), lambda model: model),
        (lambda models, x: models[0](x), lambda model: [model]),
        (lambda models, x: models["a"][0](x), lambda model: {"a": [model]}),
        (lambda config, x: config.model(x), Config),
        (Reads(), Config),
        (Slots(normed()).run, Config),
        (lambda run, x: run(x), lambda model: model.forward),
    ],
    ids=["module", "list", "dictionary", "dataclass", "to a module", "to a method", "method"],
)
def test_modules_among_the_arguments_are_put_back(fn, hold):
    model = normed()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, grads = kept(model), [parameter.grad for parameter in model.parameters()]
    cgpass.explain(fn, hold(model), X)
    assert stayed(before, model)
    assert all(
        p.grad is g and (g == 1).all() for p, g in zip(model.parameters(), grads, strict=True)
    )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_optimizers_are_put_back(kind, stepped, given):
    model = normed()
    options = {"momentum": 0.5} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)

    def trains(model, optimizer, x):
        def loss():
            optimizer.zero_grad()
            found = model(x).square().mean()
            found.backward()
            return found

        optimizer.param_groups[0]["lr"] *= 0.5
        return optimizer.step(loss)

    def trains_too(x):
        return trains(model, optimizer, x)

    fn, args = (trains, (model, optimizer, X)) if given else (trains_too, (X,))
    fn = torch.compiler.disable(fn)
    if stepped:
        fn(*args)
    before, state = kept(model), copy.deepcopy(optimizer.state_dict())
    held = list(optimizer.state.values())
    cgpass.explain(fn, *args)
    assert stayed(before, model)
    assert [*map(id, optimizer.state.values())] == [*map(id, held)]
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    torch.testing.assert_close(now["state"], state["state"], rtol=0, atol=0)


class Trainer:
    def __init__(self):
        self.parts = {"model": normed()}
        self.optimizer = torch.optim.Adam(self.parts["model"].parameters(), lr=0.1)

    def step(self, x):
        return trained_by_name(self, x)

    __call__ = step


def trained_by_name(trainer, x):
    model, optimizer = getattr(trainer, "par" + "ts")["model"], getattr(trainer, "optim" + "izer")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("how", ["argument", "in a list", "method", "callable"])
def test_what_an_object_holds_is_put_back_whatever_name_it_is_read_by(how):
    trainer = Trainer()
    before = kept(trainer.parts["model"])
    given = {
        "argument": (trained_by_name, trainer),
        "in a list": (lambda trainers, x: trained_by_name(trainers[0], x), [trainer]),
        "method": (trainer.step,),
        "callable": (trainer,),
    }
    report = cgpass.explain(*given[how], X)
    assert report.functions
    assert stayed(before, trainer.parts["model"])
    assert not trainer.optimizer.state


def test_what_an_object_holds_compiled_and_nobody_calls_is_no_hindrance():
    trainer = Trainer()
    trainer.compiled = torch.compile(normed(), backend="cgpass")
    assert cgpass.explain(trained_by_name, trainer, X).functions


def snapshot(module):
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state |= {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    found = {name: value for name, value in state.items() if value is not None}
    ids = {name: (id(value), value.data_ptr()) for name, value in found.items()}
    return ids, {name: value.clone() for name, value in found.items()}, torch.get_rng_state()


def same(before, after):
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert torch.equal(before[2], after[2])


def test_everything_is_put_back():
    model = Model()
    model(X).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    x = X.clone().requires_grad_()
    x.grad = torch.ones_like(x)
    before = snapshot(model)
    gradient, version = x.grad, x._version
    cgpass.explain(model, x)
    same(before, snapshot(model))
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())
    assert x.grad is gradient
    assert x._version == version
    assert torch.equal(x, X)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.seen = torch.zeros(8)
        self.register_buffer("total", torch.zeros(8))
        self.weight = nn.Parameter(torch.ones(8))

    @torch.compiler.disable
    def note(self, x):
        self.calls += 1
        self.seen = x.detach().sum(0)
        self.last = self.calls
        self.total = self.total + 1
        self.weight.data = self.weight.data.clone()

    def forward(self, x):
        self.note(x)
        return (x * self.weight).sin().cos().exp().tanh()


def test_what_a_module_assigns_is_put_back():
    model = Counting()
    seen, total, weight = model.seen, model.total, model.weight
    address = weight.data_ptr()
    cgpass.explain(model, X)
    assert model.calls == 0
    assert not hasattr(model, "last")
    assert model.seen is seen
    assert model.total is total
    assert model.weight is weight
    assert weight.data_ptr() == address
    assert total.tolist() == [0.0] * 8


def test_arguments_that_are_written_keep_their_values():
    def fn(x, cache):
        cache.add_(x)
        return cache.sin().cos().exp().tanh()

    x, cache = X.clone(), torch.zeros_like(X)
    report = cgpass.explain(fn, x, cache=cache)
    assert not cache.any()
    assert cache._version == 0
    names = {each.name for each in report.graphs[0].partitions[0].copied_inputs}
    assert names == {"x", "cache"}


def test_what_is_marked_static_is_handed_on_as_it_is_and_put_back():
    cache = torch.zeros_like(X)
    torch._dynamo.mark_static_address(cache)

    def fn(x, cache):
        cache.add_(x)
        return cache.sin().cos().exp().tanh()

    report = cgpass.explain(fn, X, cache)
    assert not cache.any()
    (part,) = report.graphs[0].partitions
    assert part.static_inputs == 1
    assert [each.name for each in part.copied_inputs] == ["x"]


def test_tensors_that_share_memory_go_on_sharing_it():
    seen = []

    def fn(x, y):
        seen.append(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr())
        return x.sin() + y.cos()

    whole = torch.arange(8.0)
    cgpass.explain(torch.compiler.disable(fn), whole[:4], whole[4:])
    assert set(seen) == {True}


def test_errors_are_the_functions_own_and_everything_is_put_back():
    model = Model()
    before, calls = snapshot(model), []

    def fn(x):
        calls.append(1)
        if len(calls) == 4:
            raise LookupError("the user's")
        return model(x)

    with pytest.raises(LookupError, match=r"^the user's$"):
        cgpass.explain(torch.compiler.disable(fn), X)
    same(before, snapshot(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_leaves_that_only_the_graph_knows_get_no_gradient():
    hidden = nn.Parameter(torch.ones(8))
    holder = {"weight": [hidden]}

    def fn(x):
        return (x * holder["weight"][0]).sin().cos().exp()

    cgpass.explain(fn, X)
    assert hidden.grad is None
