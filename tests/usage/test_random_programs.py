"""Any way of calling: random programs, on a few models and on random graphs, see what they see without CUDA graphs.

A failure prints a `Graph`, options and a `Program`; `check(setting, graph, [program], **options)` runs it again.
CGPASS_RANDOM_PROGRAMS=N asks for about N new programs of each kind instead of the few that always run.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.usage.programs import Setting, counted
from tests.usage.random_programs import Graph, check, compile_graph
from tests.usage.random_strategies import (
    ANY,
    FEW_WAYS,
    MODELS,
    PLAIN,
    cases,
    options,
    programs,
)
from tests.usage.test_broken_drivers import (
    BROKEN,
    consumption_unchecked,
    released_blocks_forgotten,
    wrong_alias,
)

ASKED = int(os.environ.get("CGPASS_RANDOM_PROGRAMS", "0"))
PER_GRAPH = 10

WITHOUT_ARTIFACTS = {
    "database": None,
    "deadline": None,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}


def profile(few, asked):
    """The same examples every time, or new ones where a number was asked for."""
    examples = max(asked, 1) if ASKED else few
    return settings(max_examples=examples, derandomize=not ASKED, **WITHOUT_ARTIFACTS)


few_ways = st.sampled_from(FEW_WAYS).flatmap(
    lambda way: st.tuples(st.just(way[0]), st.just(way[1]), programs(way[2]))
)
any_way = st.tuples(st.sampled_from(MODELS), options, programs(ANY))


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """Nothing compiled outlives this file."""
    yield
    compile_graph.cache_clear()


def test_random_programs_on_a_few_models(setting):
    @profile(160 if setting.device.type == "cuda" else 60, ASKED)
    @given(any_way if ASKED else few_ways)
    def run(case):
        graph, chosen, program = case
        check(setting, graph, [program], **chosen)

    with counted() as counters:
        run()
    assert counters["replays"] > counters["recordings"] // 2 > 0, counters


def test_random_programs_on_random_graphs(setting):
    @profile(5, ASKED // PER_GRAPH)
    @given(cases(PER_GRAPH))
    def run(case):
        graph, chosen, drawn = case
        check(setting, graph, drawn, **chosen)

    with counted() as counters:
        run()
    assert counters["replays"] > 0, counters


SIMULATED = Setting(torch.device("cpu"), "simulated")
ELSEWHERE = {
    wrong_alias,
    consumption_unchecked,
    released_blocks_forgotten,
}
"""Views of inputs from a recording, graphs retained late, recordings made late, results kept for long: programs of their
own prove these, or sooner."""
REACHED = sorted({f for f, _ in BROKEN} - ELSEWHERE, key=lambda f: f.__name__)
SENSITIVE = Graph(
    (
        "y.mul_(0.5)",
        "self.n.add_(x.detach().mean(0))",
        "a = (x @ self.w).sin()",
        "b = F.dropout(a * y, 0.5) + self.n",
    ),
    ("b", "a"),
)


@settings(max_examples=150, derandomize=True, phases=[Phase.generate], **WITHOUT_ARTIFACTS)
@given(programs(PLAIN))
def run_sensitive(program):
    check(SIMULATED, SENSITIVE, [program])


@pytest.mark.slow  # of the tests themselves; test_broken_drivers.py has what runs always
@pytest.mark.parametrize("break_it", REACHED, ids=lambda f: f.__name__)
def test_random_programs_find_what_is_broken(monkeypatch, break_it):
    compile_graph.cache_clear()  # what was compiled before has plans of its own by now
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="differ from the run without graphs"):
        run_sensitive()
