"""What is compiled already is explained as it is, wherever the function reaches it."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cgpass
from cgpass.errors import OptionError
from tests.usage.programs import counted

X = torch.linspace(-1, 1, 32).view(4, 8)


pytestmark = pytest.mark.usefixtures("simulated")


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x):
        return self.inner(x).sum()


@pytest.mark.parametrize("how", ["in place", "a submodule"])
def test_modules_that_are_compiled_in_place_or_in_part_run_as_they_are(how):
    outer = Outer()
    if how == "in place":
        outer.compile(backend="cgpass")
    else:
        outer.inner = torch.compile(outer.inner, backend="cgpass")
    outer(X).backward()
    with counted() as counters:
        report = cgpass.explain(outer, X)
    assert counters["graphs"] == 0
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]


class Trainer:
    def __init__(self):
        self.layers = model()
        self.step = torch.compile(self.forward, backend="cgpass")

    def forward(self, x):
        return self.layers(x).sin()

    def run(self, x):
        return self.step(x).sum() * 2


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model()
        self.step = torch.compile(self._step, backend="cgpass")

    def _step(self, x):
        return self.layers(x).sin()

    def forward(self, x):
        return self.step(x).sum()


def through_a_helper():
    compiled = torch.compile(model(), backend="cgpass")

    def loss(x):
        return compiled(x).mean()

    return lambda x: loss(x) * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Trainer().run,
        Holder,
        through_a_helper,
        lambda: functools.partial(torch.compile(model().forward, backend="cgpass")),
    ],
    ids=["an object's attribute", "a module's attribute", "a helper", "a partial"],
)
def test_compiled_functions_further_away_run_as_they_are(make):
    fn = make()
    fn(X).sum().backward()
    with counted() as counters:
        report = cgpass.explain(fn, X)
    assert counters["graphs"] == 0
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]


@pytest.mark.parametrize("how", ["module", "function", "in a list", "in place", "an object's"])
def test_compiled_arguments_run_as_they_are(how):
    module = model()
    compiled = torch.compile(module.forward if how == "function" else module, backend="cgpass")
    fn, given = (lambda call, x: call(x).sum() * 2), compiled
    if how == "in place":
        given = Outer()  # torch 2.11 compiles no module of its own in place
        given.compile(backend="cgpass")
    elif how == "in a list":
        fn, given = (lambda calls, x: calls["all"][0](x).sum() * 2), {"all": [compiled]}
    elif how == "an object's":
        fn, given = (lambda trainer, x: trainer.step(x).sum() * 2), SimpleNamespace(step=compiled)
    fn(given, X).backward()
    with counted() as counters:
        report = cgpass.explain(fn, given, X)
    assert counters["graphs"] == 0
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]


def helper(x):
    return elsewhere(x)


elsewhere = torch.compile(lambda x: x + 1, backend="eager")


def test_what_another_backend_compiles_further_away_is_no_hindrance():
    def fn(x):
        return helper(x).sin().cos().exp().tanh()

    assert cgpass.explain(fn, X).work == (5, 5)


@pytest.mark.parametrize("fn", [lambda x: x.sin(), model()])
def test_options_are_those_of_what_explain_compiles(fn):
    report = cgpass.explain(fn, X, options={"driver": "none"})
    assert report.graphs
    assert {graph.skip for graph in report.graphs} == {'driver="none" turns them off'}
    assert cgpass.explain(fn, X).graphs[0].skip is None


def test_what_is_compiled_already_has_its_options():
    with pytest.raises(OptionError, match=r"^cgpass.explain: what is compiled already has its opt"):
        cgpass.explain(torch.compile(model(), backend="eager"), X, options={"driver": "none"})


def test_an_argument_of_the_functions_own_is_given_to_it():
    def fn(x, options):
        return x.sin() * options["scale"]

    assert cgpass.explain(fn, X, options={"scale": 2}).functions
