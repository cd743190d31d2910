"""Any way of calling: random programs on random graphs see what they see without CUDA graphs.

A failure prints a `Graph`, options and a `Program`; `check(setting, graph, [program], **options)` runs it again.
CGPASS_RANDOM_PROGRAMS=N asks for about N new programs instead of the few that always run.
"""

import functools
import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.usage import random_programs as do
from tests.usage.programs import counted
from tests.usage.random_programs import Graph, Program, backward, call, check, compile_graph, edit

LONGEST = 40

OPTIONS = (
    {},
    {"outputs": "owned"},
    {"max_recordings": 2},
    {"max_copied_mib": 0},
)

NEW_VALUES = (
    "{a}.sin()",
    "{a} * {b}",
    "{a} + {b}",
    "{a}.exp().tanh()",
    "({a} @ self.w).tanh()",
    "F.linear({a}, self.w, self.b)",
    "{a}.softmax(-1)",
    "{a} + self.n",
    "({a} * self.b).sigmoid()",
    "{a}.detach()",
    "F.dropout({a}, 0.5)",
    "{a}.flip(0).clone()",
    "{a} * torch.nonzero({b}.detach().sum(-1) > 0).shape[0]",
    "{a} + torch.nonzero({b}.detach() > 0).sum()",
    "{a} * ({b}.detach() > 0).sum().item()",
)
VIEWS = ("{a}[:, :]", "{a}.t().t()", "{a}.view(-1, 4)")
CHANGES = ("{a}.mul_(0.5)", "{a}.add_({b}.detach())", "{a}[:, 1:].add_(1)", "{a}.copy_({b}.sin())")
BUFFER_CHANGES = ("self.n.add_({a}.detach().mean(0))", "self.n.copy_({a}.detach().sum(0).tanh())")
SHOWN = (
    "{a}",
    "{a}[:, 1:]",
    "{a}.t()",
    "{a}.reshape(-1)",
    "{a}[0]",
    "{a}.sum()",
    "{a}.detach()",
    "{a}.unsqueeze(0).expand(2, -1, -1)",
    "self.n",
)

_LINES = (
    *(("new", text) for text in NEW_VALUES),
    *(("view", text) for text in VIEWS),
    *(("change", text) for text in CHANGES),
    *(("buffer", text) for text in BUFFER_CHANGES),
)


def _more(draw, typical):
    """Tell if a list goes on; so it has `typical` parts, and each can be left out when shrinking."""
    return draw(st.integers(0, typical)) > 0


@st.composite
def graphs(draw, longest=10):
    base = {"x": "x", "y": "y"}
    lines, changed = [], set()
    while len(lines) < longest and _more(draw, 8):
        values = list(base)[::-1]
        kind, text = draw(st.sampled_from(_LINES))
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        text = text.format(a=a, b=b)
        if kind == "change":
            changed.add(base[a])
        if kind in ("new", "view"):
            name = f"v{len(base)}"
            base[name] = base[a] if kind == "view" else name
            text = f"{name} = {text}"
        lines.append(text)
    values = list(base)[::-1]
    shown = st.builds(
        lambda text, a: text.format(a=a), st.sampled_from(SHOWN), st.sampled_from(values)
    )
    outputs = draw(st.lists(shown, min_size=1, max_size=4))
    return Graph(tuple(lines), tuple(outputs), "".join(sorted(changed & {"x", "y"})))


@dataclass(frozen=True)
class Style:
    """Ways of calling in a program; each is a compilation of its own."""

    modes: tuple[str, ...]
    rows: tuple[int, ...]
    grads: tuple[bool, ...]
    twice: tuple[bool, ...]


styles = st.builds(
    Style,
    modes=st.sampled_from((("grad",), ("grad", "grad", "no_grad"), ("grad", "grad", "inference"))),
    rows=st.sampled_from(((3,), (3,), (3, 3, 2))),
    grads=st.sampled_from(((False,), (True,), (False, True))),
    twice=st.sampled_from(((False,),) * 7 + ((True,),)),
)

_pick = st.integers(0, 4)
_part = st.integers(0, 3)
_module = st.integers(0, 1)
_flag = st.booleans()
_rarely = st.sampled_from((False,) * 7 + (True,))
_state = st.sampled_from(("w", "b", "n"))


def _calls(style, **more):
    return st.builds(
        do.call,
        keep=st.sampled_from(("all", *do.KEPT)),
        mode=st.sampled_from(style.modes),
        backward=_flag,
        module=_module,
        grad=st.sampled_from(style.grads),
        **more,
    )


def _new_call(style):
    return _calls(style, rows=st.sampled_from(style.rows), twice=st.sampled_from(style.twice))


def _call_on_buffers(style):
    return _calls(style, on=st.just("buffer"), pick=_rarely, rows=st.sampled_from(style.rows))


def _call_on_held(style):
    return _calls(style, on=st.sampled_from(("held", "held", "input")), pick=_pick, part=_part)


_OTHERS = (
    (
        10,
        st.builds(
            do.backward,
            pick=_pick,
            part=st.none() | _part,
            retain=st.sampled_from((False, False, True)),
            again=_rarely,
        ),
    ),
    (3, st.builds(do.drop, pick=_pick, part=st.integers(-1, 3))),
    (1, st.just(do.drop_all())),
    (3, st.just(do.check_all())),
    (3, st.builds(do.gradients, pick=_pick, part=_part, retain=_flag)),
    (2, st.just(do.take_gradients())),
    (2, st.builds(do.zero_grad, set_to_none=_flag)),
    (1, st.just(do.scale_gradients())),
    (2, st.just(do.optimize())),
    (1, st.builds(do.move_data, module=_module, name=_state)),
    (1, st.builds(do.replace, module=_module, name=_state)),
    (2, st.builds(do.edit, pick=_pick, part=_part, of_inputs=_rarely)),
    (1, st.just(do.collect())),
    (1, st.just(do.reset())),
)


@functools.cache
def _steps(style):
    """Strategies of single steps, each as often as it is to be drawn."""
    calls = ((10, _new_call(style)), (10, _call_on_buffers(style)), (5, _call_on_held(style)))
    weighted = (*calls, *_OTHERS)
    return tuple(strategy for weight, strategy in weighted for _ in range(weight))


@st.composite
def programs(draw, style):
    steps = []
    while len(steps) < LONGEST and _more(draw, 14):
        steps.append(draw(draw(st.sampled_from(_steps(style)))))
    return do.Program(steps=tuple(steps), modules=draw(st.sampled_from((1, 1, 2))))


options = st.sampled_from(OPTIONS)


@st.composite
def cases(draw, programs_per_graph):
    style = draw(styles)
    graph = draw(graphs())
    drawn = draw(st.lists(programs(style), min_size=1, max_size=programs_per_graph))
    return graph, draw(options), drawn


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


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """Nothing compiled outlives this file."""
    yield
    compile_graph.cache_clear()


def test_random_programs_on_random_graphs(setting):
    @profile(10, ASKED // PER_GRAPH)
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
        Graph(
            (
                "self.n.add_(x.detach().mean(0))",
                "a = (x @ self.w).sin()",
                "b = (F.linear(a, self.w, self.b) * a + self.n).tanh()",
            ),
            ("b", "a.t()", "x"),
        ),
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
        Graph(
            (
                "a = (x @ self.w).sin()",
                "b = a * y.cos()",
                "k = torch.nonzero(a.detach().sum(-1) > 0).sum()",
                "c = F.linear(b, self.w, self.b).tanh() + k",
            ),
            ("(c * a).sigmoid() * b", "c", "a"),
        ),
        (*(call(),) * 6, call(keep="last"), edit()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_programs_found(setting, name):
    """Autograd refuses the same backwards with graphs as without."""
    graph, steps = FOUND[name]
    check(setting, graph, [Program(steps=steps)], refused_too=True)
