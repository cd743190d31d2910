"""Graph breaks behind which `torch.compile` leaves the rest of a function to eager, though the beginning is compiled."""

import contextlib
import inspect
import traceback

import pytest
import torch
from torch import nn

import cgpass
from cgpass import __main__ as command
from cgpass import torch_private
from cgpass.compile.facts import breaks
from cgpass.report.model import Report
from cgpass.report.page import html

X = torch.linspace(-1, 1, 16).view(4, 4)


pytestmark = pytest.mark.usefixtures("simulated", "counted_alone")


@contextlib.contextmanager
def block():
    yield


def tries(x):
    y = x.sin().cos().exp().tanh()
    try:  # from here on
        if y.sum() > 1e9:  # the line to name
            raise ValueError("too large")  # noqa: TRY301
    except ValueError:
        y = y * 2
    return y.sin().cos().exp().tanh()


def within(x):
    y = x.sin().cos().exp().tanh()
    with block():  # from here on
        s = y.sum().item()  # the line to name
    return y.sin().cos().exp().tanh() * s


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x).sin().cos().tanh()
        with block():  # from here on
            torch._dynamo.graph_break()  # the line to name
        return x.sin().cos()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.last = nn.Linear(4, 4), Head(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.head(self.first(x).sin().cos().tanh())).sin().cos().tanh()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, labels=None):
        x = self.layer(x).sin().cos().tanh()
        try:  # from here on
            torch._dynamo.graph_break()  # the line to name
            loss = (x - labels).square().mean()
        finally:
            pass
        return loss


def step(model, x, labels):
    loss = model(x, labels=labels)
    loss.backward()
    return loss.detach()


# What is explained with which arguments, and whose rest is left to eager.
GIVEN = {
    "try": (tries, (X,), tries, "Data-dependent"),
    "with": (within, (X,), within, "Unsupported Tensor.item() call"),
    "a sub-module": (Model, (X,), Head.forward, "torch._dynamo.graph_break()"),
    "labels": (step, (WithLoss, X, X * 2), WithLoss.forward, "torch._dynamo.graph_break()"),
}


def made(value):
    return value() if isinstance(value, type) else value


def lines_of(fn):
    """Where the rest begins, and the line to name."""
    with open(__file__) as file:
        source = file.read().splitlines()
    begin = fn.__code__.co_firstlineno
    ends = ("# from here on", "# the line to name")
    return [next(i for i in range(begin, 999) if source[i - 1].endswith(end)) for end in ends]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_rest_of_a_function_behind_a_break_in_a_block_is_left_to_eager(given, compiled):
    what, args, cut, why = GIVEN[given]
    fn, args = made(what), [made(arg) for arg in args]
    if compiled:
        args = [torch.compile(a, backend="cgpass") if callable(a) else a for a in args]
        fn = fn if fn is step else torch.compile(fn, backend="cgpass")
        fn(*args)  # long before
    report = cgpass.explain(fn, *args)
    (left,) = report.left_to_eager
    rest, line = lines_of(cut)
    name = cut.__name__
    assert left.place == f"the rest of {name} from test_breaks.py:{rest} on"
    assert left.reason.code == "graph_break"
    assert left.reason.line.startswith(f"test_breaks.py:{line} in {name}: ")
    assert why in left.reason.detail
    assert "functions of its own" in left.reason.fix
    assert "step_unsupported" not in str(report)
    text = " ".join(str(report).split())
    assert f"left to eager: {left.place}; what that runs itself is not among these" in text
    assert "% of the" in text
    assert "operators of compiled functions" not in text
    assert f", but for {left.place}" in text
    assert f"test_breaks.py:{line}" in html(report)
    assert f", but for {left.place}" in html(report)
    assert f"{left.place} is left to eager" in cgpass.summary()
    assert Report.from_dict(report.to_dict()) == report


def test_a_break_that_nobody_noted_names_the_block(monkeypatch):
    monkeypatch.setattr(torch_private, "graph_breaks", list)
    (left,) = cgpass.explain(tries, X).left_to_eager
    rest, _ = lines_of(tries)
    assert left.place == f"the rest of tries from test_breaks.py:{rest} on"
    assert left.reason.line.startswith(f"test_breaks.py:{rest} in tries: try:")
    assert "is in a block (try:, with) that has a graph break" in left.reason.detail
    assert "TORCH_LOGS=graph_breaks shows more. Or: put what can be" in left.reason.fix


SCRIPT = """
import torch
from tests.report import test_breaks

call = torch.compile(test_breaks.tries, backend="cgpass")
for _ in range(10):
    call(test_breaks.X)
"""


def test_a_script_the_rest_of_whose_function_is_left_to_eager_fails(tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    saved = tmp_path / "all.json"
    assert command.main(["check", "--save", str(saved), str(tmp_path / "script.py")]) == 1
    said = capsys.readouterr().out
    rest, line = lines_of(tries)
    left = f"left to eager: the rest of tries from test_breaks.py:{rest} on, because of test_breaks.py:{line} in tries: "
    assert said.startswith("cgpass check: FAILED: 100% of the 36 operators that compiled code ran")
    assert (
        f"fell back:\n  {left}".split()
        == said[said.index("fell back:") :].split()[: len(left.split()) + 2]
    )
    assert said.count("left to eager") == 1
    assert "graph breaks at" not in said
    assert command.main(["report", str(saved), "-o", "-"]) == 0
    assert left[:60] in capsys.readouterr().out


class Logs(nn.Module):
    """A layer that reads a value on the host."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = {}

    def forward(self, x):
        x = self.layer(x).sin().cos().tanh()
        self.seen["mean"] = x.mean().item()  # the line to name
        return x.sin().cos().exp().tanh()


class Net(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.features = features

    def forward(self, x):
        x = x.sin().cos().tanh().exp()
        x = self.features(x)  # what is called
        return x.tanh().sin().cos().exp()


def line_of(kind, comment="the line to name"):
    lines, first = inspect.getsourcelines(kind)
    return first + next(i for i, text in enumerate(lines) if comment in text)


def test_layers_beside_one_with_a_break_in_a_container_of_torchs_are_left_to_eager():
    """Dynamo compiles none of torch's own functions by themselves, as what calls them ends at the break."""
    report = cgpass.explain(
        Net(nn.Sequential(nn.Linear(4, 4), Logs(), nn.Linear(4, 4))), X, training=False
    )
    (found,) = report.left_to_eager
    called = f"test_breaks.py:{line_of(Net, 'what is called')} in forward"
    assert found.place == f"what torch/nn/modules/container.py runs, called at {called}"
    assert f"test_breaks.py:{line_of(Logs, 'the line to name')} in forward" in found.reason.line
    assert found.reason.fix.endswith("instead of calling a container of torch's")
    assert "operators of compiled code" in str(report)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_container_of_torchs_that_is_given_itself_is_left_to_eager(compiled):
    module = nn.Sequential(nn.Linear(4, 4), Logs(), nn.Linear(4, 4))
    if compiled:
        module = torch.compile(module, backend="cgpass")
        for _ in range(3):
            module(X)
    (found,) = cgpass.explain(module, X, training=False).left_to_eager
    assert found.place == "what torch/nn/modules/container.py runs besides"
    assert f"test_breaks.py:{line_of(Logs, 'the line to name')} in forward" in found.reason.line


class Calls(nn.Module):
    """Nothing lies before the call, so no graph is made of this forward before it."""

    def __init__(self, features):
        super().__init__()
        self.features = features

    def forward(self, x):
        return self.features(x).sin().cos().tanh()  # what is called


def test_a_container_of_torchs_that_is_called_first_is_named_once():
    module = Calls(nn.Sequential(nn.Linear(4, 4), Logs(), nn.Linear(4, 4)))
    for given in (module, module.features[1]):  # the layer alone has none around it
        places = [each.place for each in cgpass.explain(given, X, training=False).left_to_eager]
        called = f"test_breaks.py:{line_of(Calls, 'what is called')} in forward"
        runs = f"what torch/nn/modules/container.py runs, called at {called}"
        assert places == ([runs] if given is module else [])


def test_a_layer_with_a_break_that_is_called_by_itself_leaves_nothing_else():
    module = Net(Logs())
    module.features.register_forward_hook(lambda module, args, out: out.exp())
    assert cgpass.explain(module, X, training=False).left_to_eager == ()


def test_a_users_file_may_have_the_name_of_one_of_torchs():
    places = [
        ("/a/module.py", 3),
        (nn.modules.module.__file__, 9),
        (nn.modules.container.__file__, 1),
    ]
    frames = [traceback.FrameSummary(file, line, "forward") for file, line in places]
    last = traceback.FrameSummary("/a/layer.py", 7, "forward")
    runs = "what torch/nn/modules/container.py runs, called at module.py:3 in forward"
    assert breaks._left_by_torch([*frames, last]) == runs
    assert breaks._left_by_torch([*frames[:2], last]) is None


@pytest.mark.parametrize(
    ("fn", "detail", "fix"),
    [
        (
            lambda x: torch.repeat_interleave(x[0], x[0].long().abs()),
            "Dynamic shape operator: aten.repeat_interleave.Tensor",
            "pass output_size=. Or: ",
        ),
        (
            lambda x: x * torch.equal(x, x),
            "Data dependent operator: aten.equal.default",
            "use (a == b).all(), which stays on the device. Or: ",
        ),
        (
            lambda x: x * x.sum().item(),
            "Unsupported Tensor.item() call with capture_scalar_outputs=False",
            "keep the value on the device (torch.where, tensor arithmetic) instead of item(). Or: ",
        ),
    ],
)
def test_a_break_at_an_operator_names_it_and_the_form_to_use(fn, detail, fix):
    (reason, *_) = cgpass.explain(lambda x: fn(x.sin()), X).all_graph_breaks
    assert reason.detail.startswith(detail)
    assert reason.fix.startswith(fix)
