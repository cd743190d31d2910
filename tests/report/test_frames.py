"""Functions that `torch.compile` leaves to eager: no graph tells of them, `explain` and `check` do."""

import contextlib
import sys

import pytest
import torch
from torch import nn

import cgpass
from cgpass import __main__ as command
from cgpass import telemetry, torch_private
from cgpass.report import frames
from cgpass.report.model import Report
from cgpass.report.page import html
from tests.usage.programs import counted

X = torch.linspace(-1, 1, 16).view(4, 4)
CALLED = "functions of its own: those that a function in eager calls are compiled by themselves"


pytestmark = pytest.mark.usefixtures("simulated")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu()).relu()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max().item() > 1e6:  # the line to name
                x = x / 2
        return x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # the line to name
        return self.layer(x).relu().sin().cos() * self.calls


def tries(x):
    try:
        y = x.sin().cos().exp().tanh()
        y = y * y.sum().item()  # the line to name
    finally:
        pass
    return y


@contextlib.contextmanager
def block():
    yield


def within(x):
    with block():
        y = x.sin().cos().exp().tanh()
        torch._dynamo.graph_break()  # the line to name
    return y


def sparse(x):
    return torch.sparse.mm(x, torch.ones(4, 4)).sin().cos()  # the line to name


def after(x):
    y = x.sin().cos().exp().tanh()
    torch._dynamo.graph_break()
    for _ in range(2):
        y = y.sin()
        torch._dynamo.graph_break()  # the line to name
    return y


def lines_of(fn):
    """Where a function begins, and its line to name."""
    code = getattr(fn, "forward", fn).__code__
    with open(__file__) as file:
        source = file.read().splitlines()
    named = next(
        number
        for number in range(code.co_firstlineno, len(source))
        if source[number - 1].endswith("# the line to name")
    )
    return code.co_firstlineno, named


def shown(report):
    """Its text, without what makes lines of it."""
    return " ".join(str(report).split())


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (tries, "Unsupported Tensor.item() call with capture_scalar_outputs=False"),
        (within, "Graph break under GenericContextWrappingVariable"),
        (sparse, ""),
    ],
)
def test_a_graph_break_that_gives_up_all_of_a_function_is_named(fn, why):
    report = cgpass.explain(fn, X.to_sparse() if fn is sparse else X, training=False)
    (left,) = report.left_to_eager
    first, line = lines_of(fn)
    name = fn.__name__
    assert report.functions == ()
    assert left.place == f"test_frames.py:{first} in {name}"
    assert left.reason.line.startswith(f"test_frames.py:{line} in {name}: ")
    assert left.reason.code == "graph_break"
    assert why in left.reason.detail
    assert left.reason.fix.endswith(CALLED)
    for text in (shown(report), html(report)):
        assert "Nothing here was compiled" not in text
        assert f"test_frames.py:{line} in {name}" in text
    assert f"left to eager: {left.place}, because of {left.reason.line.split()[0]}" in shown(report)
    assert f"fix: {' '.join(left.reason.fix.split())}" in shown(report)
    assert Report.from_dict(report.to_dict()) == report


def test_what_an_eager_loop_calls_is_compiled_and_the_rest_not_counted():
    model = Layers()
    report = cgpass.explain(model, X)
    (left,) = report.left_to_eager
    first, line = lines_of(Layers)
    assert report.functions
    assert left.reason.line.startswith(f"test_frames.py:{line} in forward: if x.abs()")
    assert "graph break in loop" in left.reason.detail
    assert "capture_scalar_outputs" in left.reason.fix
    assert "earlier graph break" not in left.reason.fix
    outside = (
        f"left to eager: test_frames.py:{first} in forward; what that runs itself is not among these "
        "operators"
    )
    assert f"operators of compiled code {outside} left to eager: " in shown(report)
    assert f'<p class="warn">L{outside[1:]}.</p>' in html(report)


@pytest.mark.parametrize("fn", [tries, after])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_given_up_before_is_named_again(fn, compiled):
    """Torch doesn't try a second time, and notes nothing."""
    call = torch.compile(fn, backend="cgpass") if compiled else fn
    call(X)
    first = cgpass.explain(call, X, training=False)
    second = cgpass.explain(call, X, training=False)
    (left,) = first.left_to_eager
    assert left.reason.line.startswith(f"test_frames.py:{lines_of(fn)[1]} in {fn.__name__}: ")
    assert left.place.endswith(f" in {fn.__name__}")
    assert second.left_to_eager == first.left_to_eager
    assert cgpass.explain(lambda x: x.sin().cos().exp().tanh(), X).left_to_eager == ()


def test_what_compiles_at_last_was_not_left_to_eager():
    cgpass.explain(tries, X, training=False)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = cgpass.explain(tries, X, training=False)
    assert report.left_to_eager == ()
    assert report.functions


def test_the_recompile_limit_is_named_with_what_changed():
    report = cgpass.explain(Counts(), X)
    (left,) = report.left_to_eager
    first, line = lines_of(Counts)
    assert not report.settled
    assert left.place == f"test_frames.py:{first} in forward"
    assert left.reason.code == "recompile_limit"
    assert left.reason.line.startswith(f"test_frames.py:{line} in forward: self.calls += 1")
    assert left.reason.detail == (
        "it was compiled 8 times, as often as torch._dynamo.config.recompile_limit allows; the guard that failed last: "
        "self.calls == 7. Calls that fit nothing compiled run in eager"
    )
    assert "convert this integer into a tensor. Or: keep what changes" in left.reason.fix
    assert "TORCH_LOGS=recompiles" in left.reason.fix
    assert "[recompile_limit] fix: " in shown(report)


def test_a_function_at_the_limit_in_explain_is_compiled_afterwards():
    (left,) = cgpass.explain(Counts(), X).left_to_eager
    with counted() as counters:
        torch.compile(Counts(), backend="cgpass")(X).sum().backward()
    assert counters["graphs"] == 2
    (again,) = cgpass.explain(Counts(), X).left_to_eager
    assert again.place == left.place
    assert "compiled 8 times, as often" in again.reason.detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", None, None)),
        (
            "0/7: tensor 'x' size mismatch at index 0. expected 4, actual 5",
            ("tensor 'x' size mismatch at index 0. expected 4, actual 5", None, None),
        ),
        (
            "0/1: n == 7   # y = x * n  # w/model.py:9 in forward (HINT: do this.)\nUser stack trace:",
            ("n == 7", "model.py:9 in forward: y = x * n", "do this"),
        ),
        ("0/1: n == 7   # (_dynamo/output_graph.py:3552 in remove)", ("n == 7", None, None)),
    ],
)
def test_causes_of_recompilations(text, expected):
    assert frames._cause(text) == expected


def test_more_compilations_are_noted_than_torch_keeps():
    limit = torch_private.note_compilations(64)
    with frames.noted() as before:
        for number in range(70):
            torch.compile(tries if number == 0 else eval("lambda x: x.sin()"), backend="eager")(X)
        (left,) = frames.left_to_eager(before)
    assert left.place == f"test_frames.py:{lines_of(tries)[0]} in tries"
    assert torch_private.note_compilations(limit) == 64


MODULES = """
import sys
import torch
from tests.report import test_frames

fn = getattr(test_frames, sys.argv[1])
fn = fn() if isinstance(fn, type) else fn
call = torch.compile(fn, backend="cgpass")
also = torch.compile(lambda x: x.sin().cos().exp().tanh(), backend="cgpass")
for _ in range(20):
    call(test_frames.X)
    if sys.argv[2] == "more":
        also(test_frames.X)
"""


@pytest.mark.parametrize(
    ("name", "more", "head"),
    [
        ("Layers", "more", "FAILED: 100% of the "),
        ("Counts", "more", "FAILED: 100% of the "),
        ("Counts", "", "FAILED: nothing ran more often than to warm up\nfell back:\n"),
        ("tries", "", "FAILED: nothing was compiled by cgpass\nfell back:\n"),
    ],
)
def test_a_script_with_functions_in_eager_fails(tmp_path, capsys, monkeypatch, name, more, head):
    monkeypatch.setattr(telemetry, "_registry", telemetry._Registry())
    monkeypatch.setattr(telemetry, "compile_stats", telemetry._registry.compiled)
    (tmp_path / "script.py").write_text(MODULES)
    saved = tmp_path / "all.json"
    assert (
        command.main(["check", "--save", str(saved), str(tmp_path / "script.py"), name, more]) == 1
    )
    said = capsys.readouterr().out
    first, line = lines_of(globals()[name])
    assert said.startswith(f"cgpass check: {head}")
    kind = "tries" if name == "tries" else "forward"
    assert (
        f"\n  left to eager: test_frames.py:{first} in {kind}, because of test_frames.py:{line} in {kind}: "
        in said
    )
    assert "fell back:\n" in said
    assert command.main(["report", str(saved), "-o", "-"]) == 0
    assert f"left to eager: test_frames.py:{first} in {kind}" in capsys.readouterr().out


def called_with(x, n):
    return x.sin().cos().exp().tanh() * n


def inlines(x):
    return called_with(x, 3).sin().cos().exp().tanh()


def at_limit():
    compiled = torch.compile(called_with, backend="eager", dynamic=False)
    for n in range(12):
        compiled(X, n)


def test_what_is_inlined_by_now_is_not_left_to_eager():
    at_limit()
    report = cgpass.explain(inlines, X, training=False)
    assert report.left_to_eager == ()
    assert report.work == (9, 9)
    assert sys.getprofile() is None


def test_a_module_that_was_given_up_is_inlined_in_a_step():
    model = nn.Linear(4, 4)
    forward = torch.compile(lambda x: model(x).sin(), backend="eager", dynamic=False)
    for rows in range(2, 14):
        forward(torch.ones(rows, 4))
    inner = forward._torchdynamo_orig_callable

    def step(x):
        loss = inner(x).square().mean()
        loss.backward()
        return loss.detach()

    assert cgpass.explain(step, X).left_to_eager == ()


@pytest.mark.parametrize("more", [0, 1, 9])
def test_what_was_given_up_before_a_reset_is_not_left_to_eager(more):
    at_limit()
    torch.compiler.reset()
    for n in range(more):
        torch.compile(eval("lambda x: x + 1"), backend="eager")(X + n)

    @torch.compiler.disable
    def calls(x):  # called as a function of its own, which nobody compiles
        return called_with(x, 3)

    cgpass.explain(lambda x: calls(x).sin().cos().exp().tanh(), X, training=False)
    assert frames.Watch(torch_private.compilations(), [called_with.__code__]).given_up == set()


def test_under_a_profiler_of_the_users_what_is_reached_counts():
    at_limit()
    seen = []

    def profile(*event):
        seen.append(event[1])

    sys.setprofile(profile)
    try:
        report = cgpass.explain(inlines, X, training=False)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert [left.place.partition(" in ")[2] for left in report.left_to_eager] == ["called_with"]
    assert seen
