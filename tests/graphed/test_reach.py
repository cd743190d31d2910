"""Modules that a callable reaches by way of objects, helpers, other methods and containers."""

import functools
import types
from unittest.mock import MagicMock

import pytest
import torch

from cgpass.graphed.reach import modules_behind
from tests.graphed.steps import net, same, same_grads, step, twins

MODEL = None
HELPERS = types.ModuleType("helpers")
"""A module of the user's."""


class Calls:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


class Slots:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


class Trainer:
    def __init__(self, model):
        self._model = model
        self.nets = {"a": {"b": [model]}}
        self.calls = Calls(model)
        self.slots = Slots(model)
        self.unread = net()
        self.mock = MagicMock()

    @property
    def model(self):
        return self._model

    def inner(self, x):
        return self._model(x)

    def by_method(self, x):
        return self.inner(x)

    def by_handing_on(self, x):
        return handed(self, x)

    def by_dict(self, x):
        return self.nets["a"]["b"][0](x)

    def by_property(self, x):
        return self.model(x)

    def by_object(self, x):
        return self.calls(x)

    def by_slots(self, x):
        return self.slots.model(x)

    def by_nested_function(self, x):
        return next(apply(x) for apply in (lambda y: self.inner(y),))

    def by_mock(self, x):
        self.mock.log("x")
        return self._model(x)


class Derived(Trainer):
    """Its methods call those that they stand for."""

    def inner(self, x):
        return super().inner(x)

    def by_base(self, x):
        return Trainer.inner(self, x)


class Namespace:
    model = None

    @classmethod
    def by_class(cls, x):
        return cls.model(x)


def by_namespace(x):
    return Namespace.model(x)


class Unlike(torch.nn.Module):
    """Has an attribute of the name of a global, which is another thing."""

    def __init__(self):
        super().__init__()
        self.MODEL = torch.nn.Tanh()

    def forward(self, x):
        return self.MODEL(x)


def handed(trainer, x):
    return trainer.inner(x)


def helper(x):
    return MODEL(x)


def by_helper(x):
    return helper(x)


HELPERS.helper = helper


def by_module(x):
    return HELPERS.helper(x)


@functools.cache
def cached():
    return MODEL


def by_cache(x):
    return cached()(x)


class Method(torch.nn.Module):
    """One that does not run as a module."""

    def __init__(self, model):
        super().__init__()
        self.hidden = [model]

    def by_method(self, x):
        return self.hidden[0](x)


def forms_of(model):
    global MODEL
    MODEL, trainer, nets = model, Trainer(model), {"model": model}
    Namespace.model = model
    ways = (
        "method",
        "handing_on",
        "dict",
        "property",
        "object",
        "slots",
        "nested_function",
        "mock",
    )
    return {
        **{way: getattr(trainer, f"by_{way}") for way in ways},
        "super": Derived(model).inner,
        "base class": Derived(model).by_base,
        "class": by_namespace,
        "class method": Namespace.by_class,
        "callable object": Calls(model),
        "helper": by_helper,
        "python module": by_module,
        "cached function": by_cache,
        "dict in a closure": lambda x: nets["model"](x),
        "default": lambda x, model=model: model(x),
        "decorated": torch.no_grad()(torch.enable_grad()(by_helper)),
        "partial": functools.partial(trainer.by_method),
        "partial of a helper": functools.partial(handed, trainer),
        "method of a module": Method(model).by_method,
    }


FORMS = list(forms_of(None))


@pytest.fixture(autouse=True)
def no_model():
    global MODEL
    yield
    MODEL = None
    cached.cache_clear()


@pytest.mark.parametrize("form", FORMS)
def test_modules_that_are_reached_through_others(setting, form):
    module, plain = twins(
        setting, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    )
    graphed = setting.graphed(forms_of(module)[form], (setting.randn(4, 8),))
    same(module[1].running_mean, plain[1].running_mean)
    x = setting.randn(4, 8)
    for change in (
        lambda each: None,
        lambda each: each[0].requires_grad_(False),
        lambda each: each.load_state_dict(
            {k: v * 2 for k, v in each.state_dict().items()}, assign=True
        ),
        lambda each: each.eval(),
    ):
        change(module)
        change(plain)
        same(step(graphed, x)[0], step(plain, x)[0])
        same_grads(module, plain)
    assert graphed.stats.plain_calls == 1


@pytest.mark.parametrize("form", FORMS)
def test_nothing_else_is_found(form):
    model = net()
    found = modules_behind(forms_of(model)[form])
    assert [m for m in found if not isinstance(m, Method)] == [model]


def test_a_search_ends():
    def ping(x):
        return pong(x)

    def pong(x):
        loop.append(loop)
        return ping(x) + loop[0]

    loop = [ping]
    loop.append(loop)
    assert modules_behind(ping) == []


def test_an_attribute_is_no_global_of_its_name():
    forms_of(net())
    unlike = Unlike()
    assert modules_behind(unlike.forward, into_forwards=True) == [unlike, unlike.MODEL]
    assert MODEL not in modules_behind(lambda x: unlike.MODEL(x))
