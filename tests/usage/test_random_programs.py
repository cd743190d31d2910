"""Any way of calling: random programs, on a few models and on random graphs, see what they see without CUDA graphs.

A failure prints a `Graph`, options and a `Program`; `check(setting, graph, [program], **options)` runs it again.
CGPASS_RANDOM_PROGRAMS=N asks for about N new programs of each kind instead of the few that always run.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.usage.programs import counted
from tests.usage.random_programs import Graph, Program, backward, call, check, compile_graph, edit
from tests.usage.random_strategies import ANY, FEW_WAYS, MODELS, cases, options, programs

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


FOUND = {
    "an input is read by a partition and written by a later one": (
        Graph(
            (
                "self.n.add_(y.detach().mean(0))",
                "v2 = y.sin()",
                "v3 = v2.sin()",
                "v4 = v3.sin()",
                "v5 = v4 * torch.nonzero(v4.detach().sum(-1) > 0).shape[0]",
                "y.add_(y.detach())",
                "v6 = (v5 @ self.w).tanh()",
            ),
            ("v6",),
            "y",
        ),
        (call(), call()),
    ),
    "a written input wants a gradient, and forwards are pending": (
        Graph(
            (
                "x.mul_(0.5)",
                "v2 = x * torch.nonzero(y.detach().sum(-1) > 0).shape[0]",
                "v3 = (v2 * self.b).sigmoid()",
            ),
            ("v3",),
            "x",
        ),
        (call(grad=True),) * 3,
    ),
    "a view of a saved tensor is edited before the backward": (
        MODELS[1],
        (call(), backward(), call(), edit(part=1)),
    ),
    "outputs made in inference mode": (
        Graph(
            ("v2 = y.sin()", "v3 = v2 + torch.nonzero(v2.detach() > 0).sum()"),
            ("v3", "v2[:, 1:]"),
        ),
        (*(call(),) * 4, *(call(mode="inference"),) * 4),
    ),
    "a backward is refused after a held output was edited": (
        MODELS[2],
        (*(call(),) * 6, call(keep="last"), edit()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_programs_found(setting, name):
    """Autograd refuses the same backwards with graphs as without."""
    graph, steps = FOUND[name]
    check(setting, graph, [Program(steps=steps)], refused_too=True)
