"""Graph breaks, and what `torch.compile` left to eager for them or at its limit: line, cause and remedy."""

import inspect
import logging
import os
import subprocess
import sys
import traceback
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import cgpass
from cgpass import torch_private
from cgpass.compile.facts import breaks, lines
from cgpass.report import check
from cgpass.report.model import GraphReport, PartitionReport
from cgpass.report.report import Report
from cgpass.report.text import findings
from cgpass.telemetry.reason import OTHER_FIXES, Reason
from tests.report.samples import joined, watched

X = torch.linspace(-1, 1, 16).view(4, 4)
HINT = ". Guard failed on a parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False"
CALLED = "; or move the code that can be compiled into its own function"
PARAMETER = nn.Parameter(torch.ones(2))
PARAMETER.grad = torch.ones(2)
log = logging.getLogger(__name__)

pytestmark = pytest.mark.usefixtures("simulated", "counted_alone")


def chain(x):
    return x.sin().cos().exp().tanh()


def tries(x):
    y = chain(x)
    try:  # from here on
        if y.sum() > 1e9:  # the line to name
            raise ValueError("too large")  # noqa: TRY301
    except ValueError:
        y = y * 2
    return chain(y)


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.first, self.head, self.last = nn.Linear(4, 4), head(), nn.Linear(4, 4)

    def forward(self, x):
        return chain(self.last(self.head(chain(self.first(x)))))  # what is called


def at(kind, comment="the line to name"):
    lines, first = inspect.getsourcelines(kind)
    return f"test_breaks.py:{next(n for n, text in enumerate(lines, first) if comment in text)}"


def test_the_rest_of_a_function_behind_a_break_in_a_block_is_left_to_eager():
    report = cgpass.explain(tries, X)
    (left,) = report.left_to_eager
    assert left.rest == f"the rest of tries from {at(tries, '# from here on')} on"
    assert left.line.startswith(f"{at(tries)} in tries: ")
    assert left.detail.startswith("graph break: a branch on a tensor's value")
    assert left.fix.endswith(CALLED)
    text = joined(report)
    assert f"{left.rest} runs in eager because of {at(tries)} in tries: " in text
    assert f": {left.detail} [graph_break] Do: {left.fix}" in text
    assert "operators of compiled code ran in graphs" in text
    assert "or is left to it, is not counted" in text
    assert "step_unsupported" not in text
    assert Report.from_dict(report.to_dict()) == report


# ---- containers of torch's


class Logs(nn.Module):
    """A layer that reads a value on the host."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), {}

    def forward(self, x):
        x = chain(self.layer(x))
        self.seen["mean"] = x.mean().item()  # the line to name
        return chain(x)


class Says(nn.Module):
    """Says something before it does anything."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        print("a layer", x.shape)  # noqa: T201  the line to name
        return chain(self.layer(x))


@pytest.mark.parametrize(
    ("layer", "around", "compiled"),
    [
        (Logs, "itself", False),
        (Says, "a module", False),
        (Logs, "a module", True),
        (Says, "itself", True),
    ],
)
def test_layers_beside_one_with_a_break_in_a_container_are_left_to_eager(layer, around, compiled):
    """Dynamo compiles none of torch's own functions by themselves, as what calls them ends at the break."""

    def container():
        return nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4))

    module = container() if around == "itself" else Model(container)
    call = torch.compile(module, backend="cgpass") if compiled else module
    for _ in range(3 if compiled else 0):
        call(X)
    report = cgpass.explain(call, X, training=False)
    runs = "what torch/nn/modules/container.py runs"
    (left,) = (each for each in report.left_to_eager if each.rest.startswith(runs))
    called = f", called at {at(Model, 'what is called')} in forward"
    assert left.rest == runs + (" besides" if around == "itself" else called)
    assert left.line.startswith(f"{at(layer)} in forward: ")
    assert "one by one in a forward of your own, without a loop" in left.fix
    assert not report.graph_breaks
    if compiled:
        assert left.rest in cgpass.summary()


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


# ---- breaks with no operator before them


def first_reads(x, start):
    begin = start.item()  # the line to name
    return chain(x[:, begin:])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sync_before_the_first_operator_is_named(compiled):
    fn, arg = first_reads, torch.tensor(1)
    call = torch.compile(fn, backend="cgpass") if compiled else fn
    with torch.no_grad():
        for _ in range(3 if compiled else 0):
            call(X, arg)  # long before
    report = cgpass.explain(call, X, arg, training=False)
    (found,) = report.graph_breaks
    assert found.line.startswith(f"{at(fn)} in {fn.__name__}: ")
    assert found.is_earlier is compiled
    assert ("noted before this report: graph break: " in joined(report)) is compiled
    assert report.boundaries == 1
    assert found.fix
    assert f"at {at(fn)} in {fn.__name__}: " in cgpass.summary() or not compiled


def test_a_break_from_before_a_reset_is_none_of_a_function_that_has_it_no_more():
    breaks = [True]

    def fn(x):
        if breaks:
            torch._dynamo.graph_break()
        return chain(x)

    call = torch.compile(fn, backend="cgpass")
    call(X)
    torch.compiler.reset()
    breaks.clear()
    call(X)
    assert cgpass.explain(call, X, training=False).graph_breaks == ()
    assert "graph break" not in cgpass.summary()


def training_step(model, optimizer, x):
    optimizer.zero_grad()  # clears
    loss = model(x).square().mean()
    loss.backward()  # goes back
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # steps
    return loss.item()  # reads


@pytest.mark.parametrize("scheduled", [False, True])
def test_every_break_of_a_training_step_is_named_and_what_is_torchs_own_is_to_be_left(scheduled):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    if scheduled:  # it wraps optimizer.step
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    report = cgpass.explain(training_step, model, optimizer, X)
    found = {each.line.rpartition("# ")[2]: each for each in report.graph_breaks}
    assert set(found) == {"clears", "goes back", "steps", "reads"}
    left = [name for name, each in found.items() if each.fix.startswith("leave it")]
    assert sorted(left) == ["clears", "goes back", "steps"]
    said = "a scheduler wraps the optimizer's step" if scheduled else "in torch/optim/optimizer.py:"
    assert said in found["steps"].detail
    assert any(graph.place.startswith("torch/optim/adam") for graph in report.graphs)


def helper(x):
    return x.mean().item()  # in the helper


def calls_twice(x):
    a = helper(chain(x))  # the first call
    return chain(chain(x) * a)


def test_a_break_in_a_helper_names_the_call_that_led_to_it():
    (found,) = cgpass.explain(calls_twice, X, training=False).graph_breaks
    assert found.line.startswith(f"{at(helper, 'in the helper')} in helper: ")
    reached = f", reached from {at(calls_twice, 'the first call')} in calls_twice"
    assert found.detail.endswith(reached)


FIRST = """
from cgpass import explain, set_defaults
import torch
set_defaults(driver="simulated", compiler="eager")
with explain() as report:
    torch.compile(lambda x: (print(), x.sin())[1], backend="cgpass")(torch.ones(2))
assert len(report.graph_breaks) == 1, report
"""


def test_breaks_of_a_first_compilation_are_noted_as_dynamo_loads():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def loops(x):
    for _ in range(2):
        x = x * helper(x)
    return x


def test_a_break_is_told_beside_another_function_that_it_leaves_to_eager():
    calls = [torch.compile(each, backend="cgpass") for each in (calls_twice, loops)]
    report = watched(lambda x: [call(x) for call in calls], X)
    (left,), (found,) = report.left_to_eager, report.graph_breaks
    assert left.rest.endswith(" in loops")
    assert left.line == found.line
    assert found.detail.endswith(" in calls_twice")


def two(x):
    y, _ = chain(x) * x.sum().item(), print("here")  # noqa: T201
    return chain(y)


def test_two_breaks_at_a_line_are_two():
    found = cgpass.explain(two, X, training=False).graph_breaks
    assert [each.detail.split(": ")[1] for each in found] == [
        "the host reads a tensor's value",
        "print can't be traced",
    ]


def test_a_break_is_none_of_another_forward_in_its_file():
    modules = Says(), Model(nn.GELU)
    breaks_, fine = (torch.compile(each, backend="cgpass") for each in modules)
    breaks_(X)
    fine(X)
    for call, count in ((fine, 0), (breaks_, 1)):
        assert len(watched(call, X).graph_breaks) == count


def test_breaks_of_other_backends_and_of_libraries_are_not_ours():
    torch.compile(first_reads, backend="eager")(X, torch.tensor(1))
    torch.compile(Says(), backend=lambda gm, inputs: gm)(X)
    assert torch_private.graph_breaks() == []
    assert cgpass.summary() == "no graph was compiled"

    def logs(x):
        x = chain(x)
        log.warning("%s", x.mean().item())
        return chain(x)

    lines = [each.line for each in cgpass.explain(logs, X, training=False).graph_breaks]
    assert all(line.startswith("test_breaks.py:") for line in lines)


# ---- words


@pytest.mark.parametrize(
    ("fn", "detail", "fix"),
    [
        (lambda x: torch.repeat_interleave(x[0], x[0].long().abs()), "aten.repeat_interleave.Tensor", "pass output_size="),
        (lambda x: x * torch.equal(x, x), "aten.equal.default", "use (a == b).all(), which stays on the device"),
        (lambda x: x * x.sum().item(), "the host reads a tensor's value", "keep the value on the device (torch.where"),
        (lambda x: x + 1 if x.sum() > 0 else x, "a branch on a tensor's value", "use torch.where; to check: assert"),
        (lambda x: (warnings.warn("odd", stacklevel=1), x)[1], "warnings.warn can't be traced", breaks._BEHIND),
        (lambda x: (log.info("odd"), x)[1], "a logger's method can't be traced", breaks._BEHIND),
        (lambda x: (open(os.devnull).close(), x)[1], "open can't be traced", f"{breaks._OUTSIDE}\n"),
        (lambda x: (torch.save(x, os.devnull), x)[1], "save can't be traced", f"{breaks._OUTSIDE}\n"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:odd")
def test_a_break_has_a_cause_and_one_remedy(fn, detail, fix):
    (reason, *_) = cgpass.explain(lambda x: fn(x.sin()), X).graph_breaks
    assert reason.detail.startswith(f"graph break: {detail}")
    assert f"{reason.fix}\n".startswith(fix)
    assert "\n" not in str(reason)


def test_what_is_not_known_is_told_in_torchs_words_of_which_some_are_left_out():
    text = "Some new break\n  Hint: This graph break is fundamental - no.\n  Hint: Remove the call. It helps.\n  Hint: Other."
    found = breaks.reason_of(text, "model.py:41 in forward")
    assert (found.detail, found.fix) == ("graph break: Some new break", "Remove the call")
    text = "A call\n  Hint: Your code may result in an error when running in eager. Please check it. You can."
    assert breaks.reason_of(text, None).fix == "Please check it"
    assert breaks.reason_of(f"A call\n  Hint: Use {'long ' * 99}", None).fix.endswith("long [...]")
    text = "Observed exception\n  Hint: Please double check that your code has no similar error"
    found = breaks._of_stack(f'{text}\n  File "model.py", line 4, in forward', [])
    assert found.line == "model.py:4 in forward"
    for line, helps in (("x = table[t]", True), ("x[k] = y.item()", False)):
        assert ("i.view(1)" in breaks.reason_of("tolist()", line).fix) is helps
    assert found.detail == "graph break: an exception is raised"
    assert found.fix == "check and raise before what is compiled"
    text = "Unsupported context manager\n  Explanation: Dynamo does not know how to enter a `File` context manager."
    assert (
        breaks.reason_of(text, None).detail
        == "graph break: a `with` block of a File can't be traced"
    )
    text = "A call\n  Explanation: Dynamo does not know how to trace the builtin `time.time.` This is one."
    assert breaks.reason_of(text, None).detail == "graph break: time.time can't be traced"
    for text in ("Data-dependent branching", "generic_jump TensorVariable()"):
        drawn = breaks.reason_of(text, "m.py:9 in forward: if random.random() < 0.2:")
        assert drawn.detail == "graph break: a random number of Python or NumPy is used"
    for code in ("torch.random.get(x)", "random.randint(1, x.item())", "random.choice(x.tolist())"):
        read = breaks.reason_of("_local_scalar_dense", f"m.py:9 in forward: y = {code}")
        assert read.detail == "graph break: the host reads a tensor's value"
    assert breaks.reason_of("Unsupported", None).fix == "TORCH_LOGS=graph_breaks shows more"
    assert max(len(f"     Do: {fix}") for _, _, fix in breaks._KNOWN) <= 100, "one line of a report"


# ---- functions that were given up


def test_a_call_inside_a_transform_leaves_a_function_to_eager_until_torch_is_reset():
    call = torch.compile(lambda x: x.sin(), backend="cgpass")
    report = cgpass.explain(torch.compiler.disable(torch.func.vmap(call)), X, training=False)
    (left,) = report.left_to_eager
    assert left.fix == f"{OTHER_FIXES['transform']}; then call torch.compiler.reset()"
    torch.compiler.reset()
    assert cgpass.explain(call, X).work[0]


def gives_up(x):
    try:
        y = x.sin().cos().exp().tanh()
        y = y * y.sum().item()  # the line to name
    finally:
        pass
    return y


def clips(x):
    for _ in range(2):
        x = x.sin()
        nn.utils.clip_grad_norm_([PARAMETER], 1.0, error_if_nonfinite=True)  # the line to name
    return x.cos()


def test_a_break_in_a_file_of_torchs_that_gives_up_a_function_is_told_once_by_the_users_line():
    report = watched(torch.compile(clips, backend="cgpass"), X)
    (left,) = report.left_to_eager
    assert left.line.startswith(f"{at(clips)} in clips: ")
    assert ", in torch/nn/utils/clip_grad.py:" in left.detail
    assert report.boundaries == 1


def test_a_break_in_a_container_that_gives_up_a_function_is_told_once():
    container = nn.Sequential(nn.Linear(4, 4), Says())

    def loops(x):
        for _ in range(2):
            x = container(x)
        return x

    report = watched(torch.compile(loops, backend="cgpass"), X)
    (left,) = report.left_to_eager
    assert left.rest.endswith(" in loops")
    assert breaks._LOOP in left.fix
    assert report.boundaries == 1


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("/home/me/model.py", "remove it"),
        ("/lib/site-packages/lib/layer.py", "call it outside of what is compiled"),
        (torch.distributed.__file__, "call it outside of what is compiled"),
        (
            os.path.join(os.path.dirname(torch.__file__), "distributed/fsdp/_fully_shard/_x.py"),
            'compile each layer by itself (layer.compile(backend="cgpass"))',
        ),
    ],
)
def test_nobody_is_told_to_change_what_others_wrote(file, fix):
    frames = [traceback.FrameSummary(each, 9, "forward") for each in ("/home/me/a.py", file)]
    text = "Call to `torch._dynamo.graph_break()`"
    assert breaks._given_up(text, frames, "f").fix == f"{fix}{CALLED}"
    for hint in ("Remove mutations from the generator.", "Avoid it."):
        text = f"A generator\n  Hint: {hint}"
        frames = [frames[0], traceback.FrameSummary(torch.nn.modules.module.__file__, 9, "f")]
        assert breaks._of_stack(text, frames).fix == breaks._OUTSIDE


def test_a_break_that_gives_up_all_of_a_function_is_named_until_a_reset():
    """Torch doesn't try a second time, and notes nothing."""
    place = f"test_breaks.py:{gives_up.__code__.co_firstlineno} in gives_up"
    call = torch.compile(gives_up, backend="cgpass")
    for is_earlier in (False, True):
        report = cgpass.explain(call, X, training=False)
        (left,) = report.left_to_eager
        assert (left.rest, report.graphs) == (place, ())
        assert left.line.startswith(f"{at(gives_up)} in gives_up: ")
        assert left.detail.startswith("graph break: the host reads a tensor's value")
        assert left.is_earlier is is_earlier
        assert left.fix.endswith(CALLED)
        assert f"{place} runs in eager because of {at(gives_up)} in gives_up: " in joined(report)
    for _ in range(2):  # it was wrapped long before the second
        torch.compiler.reset()
        assert cgpass.explain(chain, X, training=False).left_to_eager == ()
        torch.compiler.reset()
        call(X)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = cgpass.explain(gives_up, X, training=False)
    assert report.left_to_eager == ()
    assert report.graphs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", None, "fix")),
        (
            "0/1: n == 7   # y = x * n  # w/model.py:9 in forward (HINT: set torch._dynamo.config.a_b = True.)\nUser",
            ("n == 7", None, "fix"),  # whose file that is, the name's end does not tell
        ),
        ("0/1: p == 7  # f()  # nn/x.py:9 in f", ("p == 7", "torch/nn/x.py:9 in f: f()", "fix")),
        ("0/1: len(seen) == 7", ("len(seen) == 7", None, "fix")),
        ("0/1: n == 7   # (_dynamo/output_graph.py:3552 in remove)", ("n == 7", None, "fix")),
        ("0/0: ___check_type_id(s, 140717788058112), x", ("___check_type_id(s), x", None, "fix")),  # an id of this process
        (f"0/1: w requires_grad mismatch. expected requires_grad=0{HINT}. ", ("w requires_grad mismatch. expected requires_grad=0", None, "fix")),
        (f"0/1: w size mismatch. expected 4, actual 5{HINT}", (f"w size mismatch. expected 4, actual 5{HINT}", None, "fix")),
        ("0/1: x requires_grad mismatch. expected requires_grad=0", ("x requires_grad mismatch. expected requires_grad=0", None, "fix")),
    ],
)  # fmt: skip
def test_causes_of_recompilations(text, expected):
    assert breaks._cause(text, f"{lines.TORCH}nn/x.py", "fix") == expected


@torch._dynamo.config.patch(recompile_limit=1)
def test_a_compiled_optimizer_is_told_of_with_the_line_that_calls_it():
    weight = nn.Parameter(torch.ones(2))
    optimizer, weight.grad = torch.optim.SGD([weight], 0.1), torch.ones(2)

    def step():
        optimizer.step()  # the line to name

    call = torch.compile(step, backend="cgpass")
    report = watched(lambda lr: optimizer.param_groups[0].update(lr=lr) or call(), 0.1, 0.2)
    assert report.left_to_eager[0].rest.endswith(f"in step, called at {at(step)} in step")
    assert "make an lr that changes a tensor" in report.left_to_eager[0].fix
    guard, file = "self.param_groups[0]['betas'][0] == 0.9", f"{lines.TORCH}optim/adam.py"
    fixes = [
        breaks._cause(guard, file, OTHER_FIXES[code])[2]
        for code in ("recompiled", "recompile_limit")
    ]
    assert [each.partition(",")[0] for each in fixes] == ["leave it", "keep it fixed (OneCycleLR"]


def test_functions_under_torchs_decorators_are_named():
    def halved(x):
        return chain(x * 0.5)  # the line to name

    wrapped = [torch.no_grad()(each) for each in (halved, lambda x: chain(x * 2))]
    calls = [torch.compile(each, backend="cgpass") for each in wrapped]
    (found,) = watched(lambda x: [call(x) for call in calls], X, X).recompilations
    assert f"{at(halved)} in halved" in found.line


def test_a_list_that_grows_is_told_beside_the_break_at_its_line():
    seen, model = [], Model(lambda: nn.Sequential(nn.GELU()))
    model.head[0].register_forward_hook(lambda *args: seen.append(args[2].mean().item()))
    report = watched(torch.compile(model, backend="cgpass"), X, X, X)
    assert {each.line for each in report.left_to_eager} == {report.recompilations[0].line}
    assert "len(seen) == 1" in report.recompilations[-1].detail
    assert report.recompilations[-1].fix.startswith("keep its length")


@pytest.mark.parametrize("grows", [False, True])
def test_what_breaks_before_any_operator_is_told_later_and_in_a_block_with_a_reset(grows):
    weight, seen = nn.Parameter(torch.ones(2)), []
    optimizer, weight.grad = torch.optim.SGD([weight], 0.1), torch.ones(2)

    def update(x):
        (seen.append if grows else seen.count)(x.item())  # the line to name
        optimizer.step()

    call = torch.compile(update, backend="cgpass")
    watched(call, X.sum(), X.sum())
    resets = watched(call, X.sum()), watched(lambda x: call(x) or torch.compiler.reset(), X.sum())
    for report in resets:
        found = [each for each in report.graph_breaks if at(update) in each.line]
        assert [each.is_earlier for each in found] == [not grows]
        assert ["len(seen) == " in each.detail for each in report.recompilations] == [True] * grows


class Often(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return chain(x) * (1 if self.calls > 99 else 2)


class Seldom(Often):
    def forward(self, x):
        self.calls += 1
        return chain(x) * (1 if self.calls > 99 else 3)


@torch._dynamo.config.patch(recompile_limit=3)
def test_the_limit_of_one_function_hides_no_recompilation_of_another():
    often, seldom = (torch.compile(each(), backend="cgpass") for each in (Often, Seldom))
    report = watched(
        lambda both: [often(X), seldom(X) if both else None], *[True] * 2, *[False] * 3
    )
    assert [each.rest for each in report.left_to_eager] == [
        f"{at(Often, 'def forward')} in forward"
    ]
    assert {each.line.partition(" in ")[0] for each in report.recompilations} == {
        at(Seldom, "calls")
    }


@pytest.mark.parametrize(
    ("guard", "left"),
    [
        ("self.calls == 7", "self.calls == "),
        ("L['n'] == -1.5e-05. Calls", "L['n'] == . Calls"),
        ("w2['0'][10] index 2. expected 8", "w2['0'][10] index 2. expected "),
    ],
)
def test_values_are_left_out_of_what_tells_guards_apart(guard, left):
    assert breaks._without_values(guard) == left


def test_what_a_layer_of_torchs_reads_is_told_at_the_users_line():
    layers = nn.Sequential(nn.Dropout(0.5))
    fn = lambda x: layers(x).sin()  # noqa: E731
    call = torch.compile(fn, backend="cgpass")
    report = watched(lambda mode: layers.train(mode) and call(X), True, False)
    (found,) = report.recompilations
    assert found.line.startswith(f"test_breaks.py:{fn.__code__.co_firstlineno} in <lambda>")
    assert str(report).startswith("only warm-up calls ran: functions were compiled once more")


def test_each_cause_at_a_line_is_told_with_its_own_count_before_what_costs_less():
    call = torch.compile(chain, backend="cgpass", dynamic=False)
    batches = [x.clone() for x in (X, X[:3], X[:2], X.double()) for _ in range(4)]
    report = watched(call, *batches)
    sizes, dtype = report.recompilations
    assert [sizes.count, dtype.count] == [2, 1]
    assert "dtype" in dtype.detail
    slow = Reason("host_sync", "aten.nonzero.default", "reads", "don't", "a.py:1")
    part = PartitionReport(name="eager", captured=False, num_ops=9, calls=99, reasons=(slow,))
    graph = GraphReport(direction="forward", partitions=(part,), calls=99)
    found = findings(replace(report, graphs=(graph,)))
    assert [each.code for each in found] == ["recompiled", "recompiled", "host_sync"]


def test_a_function_that_was_compiled_for_another_backend_is_told_to_be_compiled_once():
    torch.compile(chain, backend="eager")(X)
    (found,) = watched(torch.compile(chain, backend="cgpass"), X).recompilations
    assert found.line == f"test_breaks.py:{chain.__code__.co_firstlineno} in chain"
    assert found.detail == "compiled once more: backend or options were others"
    assert found.fix.startswith("compile it once, for one backend and with one set of options")


@torch._dynamo.config.patch(recompile_limit=2)
def test_layers_that_are_unfrozen_one_by_one_stay_in_graphs_by_the_remedy():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    call = torch.compile(lambda x: model(x), backend="cgpass")
    for resets in (False, True):
        with cgpass.explain() as report:
            for layer in model.requires_grad_(False):
                layer.requires_grad_(True)
                torch.compiler.reset() if resets else None
                call(X)
        limited = not resets and report.counters["graphs"] > 1  # torch 2.11 has no guard on it
        fixes = [each.fix[:27] for each in report.left_to_eager]
        assert fixes == ["call torch.compiler.reset()"] * limited


def test_more_compilations_are_noted_than_torch_keeps():
    cgpass.explain(chain, X, training=False)
    before = torch_private.compilations()
    for number in range(70):
        torch.compile(gives_up if number == 0 else eval("lambda x: x.sin()"), backend="eager")(X)
    (left,) = breaks.left_to_eager(before, {})
    assert left.rest == f"test_breaks.py:{gives_up.__code__.co_firstlineno} in gives_up"


def test_a_check_of_functions_in_eager_fails():
    call = torch.compile(tries, backend="cgpass")
    passes, said = check.verdict(watched(call, *[X] * 20), 0.95)
    assert not passes
    assert said.startswith("cgpass check: FAILED: 100% of the 152 operators that compiled code ran")
    assert f", because of {at(tries)}" in " ".join(said.partition("fell back:\n")[2].split())


def test_a_training_step_is_not_told_of_by_our_lines():
    def loss(x):
        raise ValueError(x.shape)

    step = cgpass.train_step(loss, torch.optim.SGD([nn.Parameter(X)], 0.1))
    with cgpass.explain() as report, pytest.raises(ValueError, match="Size"):
        step(X)
    told = "the loss function of a training step runs in eager because of test_breaks.py:"
    assert told in joined(report)
    assert "whole_step.py" not in str(report)


def test_what_is_left_out_where_torch_compiles_breaks_no_graph():
    def follows_the_remedy(x):
        y = x.sin()
        if not torch.compiler.is_compiling():
            print(log.info("odd"), torch.save(y, os.devnull))  # noqa: T201
        return y.cos()

    call = torch.compile(follows_the_remedy, backend="cgpass", fullgraph=True)
    report = watched(call, X)
    assert report.graphs
    assert not report.boundaries
