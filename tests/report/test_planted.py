"""Programs with one planted cause each: the report's text names cause, line and remedy."""

import inspect
import re

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report.report import html
from tests.report.samples import joined

X = torch.linspace(-1, 1, 64).view(8, 8)

pytestmark = pytest.mark.usefixtures("simulated")


def chain(x):  # planted
    return x.sin().cos().exp().tanh()


def prints(x):
    y = chain(x)
    print("seen", y.shape)  # noqa: T201  planted
    return chain(y)


def loop(x):
    for _ in range(3):
        x = chain(x)
        torch._dynamo.graph_break()  # planted
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(8)), 0


class Moved(Net):
    def forward(self, x):
        return chain(x * self.weight)  # planted


class Counts(Net):
    def forward(self, x):
        self.calls += 1  # planted
        return chain(x) * self.calls


def calls(fn, *batches, times=6):
    call = torch.compile(fn, backend="cgpass")
    for n in range(times):
        call(batches[n % len(batches)])


def moves():
    model = Moved().requires_grad_(False)
    call = torch.compile(model, backend="cgpass")
    memory = bytearray(8 * 32)
    for n in range(8):  # of its own each time, where no other one lay
        weight = torch.frombuffer(memory, dtype=torch.float32, count=8, offset=n * 32)
        model.weight = nn.Parameter(weight, requires_grad=False)
        call(X)


def several():
    models = [Moved().requires_grad_(False) for _ in range(3)]
    for _ in range(4):
        for model in models:
            torch.compile(model, backend="cgpass")(X)


def kept(x):
    y = chain(x)
    return y + 1  # planted


def keeps():
    call = torch.compile(kept, backend="cgpass")
    results = [call(X) for _ in range(8)]
    assert len(results) == 8


def steps():
    params, places = [nn.Parameter(torch.ones(8)) for _ in range(3)], []
    step = torch.compile(torch.optim.SGD(params, lr=0.1, momentum=0.9).step, backend="cgpass")
    for _ in range(9):
        for each in params:
            each.grad = torch.ones(8)
        places.append(params[0].data.clone())
        params[0].data = places[-1]
        step()  # planted


# Name: what runs, where the cause was planted, what the text says of it, and what to do.
PLANTED = {
    "print": (
        lambda: calls(prints, X),
        prints,
        "graph break: print can't be traced [graph_break]",
        "call it outside of what is compiled, or behind `if not torch.compiler.is_compiling():`",
    ),
    "dtype": (
        lambda: calls(chain, X, X.double()),
        chain,
        "compiled once more: tensor 'x' dtype mismatch. expected Float, actual Double [recompiled]",
        "keep dtypes, sizes, requires_grad, objects, Python values and modes (autocast, no_grad) the same",
    ),
    "moved parameter": (
        moves,
        Moved.forward,
        "weight (32 B): moved, so each call that finds it at a new place copies it [moved]",
        "write into it in place (copy_; compute with a clone if the backward needs it), unless modules share the code",
    ),
    "recompile limit": (
        lambda: calls(Counts(), X, times=12),
        Counts.forward,
        (
            "it was compiled 8 times, as often as torch._dynamo.config.recompile_limit allows; the guard that failed last: "
            "self.calls == 7. Calls that no compiled version fits run in eager [recompile_limit]"
        ),
        "keep the value fixed or out of the function, or make it a tensor if only arithmetic reads it",
    ),
    "several modules": (
        several,
        Moved.forward,
        "captured_0: 2 recordings: the first call with other tensors for weight (read at test_planted.py:",
        "leave it if several modules share code; otherwise write into tensors in place (copy_)",
    ),
    "kept results": (
        keeps,
        kept,
        "captured_0: outputs still referenced were copied 6 times (1.5 KiB) [rescues]",
        "drop results before the next call, if you can",
    ),
    "compiled optimizer": (
        steps,
        steps,
        "1 recording: moved: self.param_groups[0]['params'][0] (float32[8]) [moved]",
        "write into it in place (copy_; compute with a clone if the backward needs it), unless modules share the code",
    ),
    "graph break in a loop": (
        lambda: calls(loop, X),
        loop,
        "graph break: torch._dynamo.graph_break() is called, in a loop [graph_break]",
        "remove it; or move the code that can be compiled into its own function",
    ),
}
if torch.__version__ < "2.13":  # it gives other words
    PLANTED["dtype"] = (*PLANTED["dtype"][:2], "mismatch", PLANTED["dtype"][3])


def test_no_line_is_named_for_results_that_several_lines_make():
    def two(x):
        y = chain(x)
        z = y + 1
        return z, y * 2

    call = torch.compile(two, backend="cgpass")
    with cgpass.explain() as report:
        kept = [call(X)[1] for _ in range(6)]
        assert len(kept) == 6
    costs = joined(str(report).partition("What costs most:")[2])
    assert re.match(r"1\. inference of test_planted.py:\d+ in two, captured_0 outputs still", costs)


def planted_at(fn):
    lines, first = inspect.getsourcelines(fn)
    return next(n for n, text in enumerate(lines, first) if text.rstrip().endswith("planted"))


@pytest.mark.parametrize("name", PLANTED)
def test_cause_line_and_remedy_are_found_in_the_text(name):
    run, fn, cause, remedy = PLANTED[name]
    with cgpass.explain() as report:
        run()
    costs = joined(str(report).partition("What costs most:")[2].partition("\n\n")[0])
    for found in (f"test_planted.py:{planted_at(fn)}", cause, f"Do: {remedy}"):
        assert found in costs
    numbers = [costs.index(text) for text in (cause, f"Do: {remedy}")]
    assert re.findall(r"(\d+)\. (?:test_planted|\w+ of)", costs[: numbers[0]])  # one of the list
    assert joined(cause.partition(" [")[0]).replace("'", "&#39;") in joined(html(report))
    assert max(map(len, str(report).splitlines())) <= 100


def test_a_function_that_is_given_up_has_no_entry_for_each_time_it_was_compiled():
    model = Net()
    model.weight.grad = torch.ones(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="cgpass")
    with cgpass.explain() as report:
        for n in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 / (n + 1)
            step()
    (place,) = [each.rest for each in report.left_to_eager]
    assert place not in [each.line for each in report.recompilations]
