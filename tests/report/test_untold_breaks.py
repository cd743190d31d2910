"""Graph breaks with no operator before them: no graph ends there, and all the same they are named."""

import contextlib
import logging
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import cgpass
from cgpass import __main__ as command
from cgpass import telemetry, torch_private
from cgpass.report.model import Report
from cgpass.report.page import html
from tests.report.test_breaks import Calls, line_of, tries

X = torch.linspace(-1, 1, 16).view(4, 4)
log = logging.getLogger(__name__)


pytestmark = pytest.mark.usefixtures("simulated", "counted_alone")


def first_reads(x, start):
    begin = start.item()  # the line to name
    return x[:, begin:].sin().cos().exp().tanh()


def splits(x, sizes):
    parts = x.split(sizes.tolist())  # the line to name
    return torch.cat([part.sin().cos().exp().tanh() for part in parts])


class Says(nn.Module):
    """Says something before it does anything."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        self.how("a layer %s", x.shape)  # the line to name
        return self.layer(x).sin().cos().tanh()


GIVEN = {
    "item": (first_reads, torch.tensor(1), "Tensor.item()"),
    "tolist": (splits, torch.tensor([1, 3]), "Data dependent"),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sync_before_the_first_operator_is_named(given, compiled):
    fn, arg, said = GIVEN[given]
    call = torch.compile(fn, backend="cgpass") if compiled else fn
    for _ in range(3 if compiled else 0):
        call(X, arg)  # long before
    report = cgpass.explain(call, X, arg, training=False)
    (found,) = report.graph_breaks
    place = f"test_untold_breaks.py:{line_of(fn)}"
    assert found.line.startswith(f"{place} in {fn.__name__}: ")
    assert said in found.detail
    assert found.fix.startswith(("Set ", "Enable ", "keep the value on the device"))
    text = " ".join(str(report).split())
    assert f"graph breaks at 1 line ({place}): what runs there" in text
    assert f"graph break at {place} in {fn.__name__}: " in text
    assert place in html(report)
    assert Report.from_dict(report.to_dict()) == report
    assert f"graph break at {place} in {fn.__name__}: " in cgpass.summary() or not compiled


def test_what_was_met_before_counts_only_where_it_still_runs():
    call = torch.compile(first_reads, backend="cgpass")
    call(X, torch.tensor(1))
    other = torch.compile(lambda x: x.sin().cos().exp().tanh(), backend="cgpass")
    other(X)
    assert cgpass.explain(other, X, training=False).graph_breaks == ()
    assert len(cgpass.explain(call, X, torch.tensor(1), training=False).graph_breaks) == 1
    torch.compiler.reset()
    assert cgpass.explain(other, X, training=False).graph_breaks == ()


@pytest.mark.parametrize("how", [print, log.info, log.warning], ids=["print", "info", "warning"])
@pytest.mark.parametrize("around", ["itself", "a module"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_container_with_a_layer_that_begins_with_a_break_is_left_to_eager(how, around, compiled):
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Says(how), nn.Linear(4, 4))
    besides = "besides"
    if around == "a module":
        module = Calls(module)
        besides = f"called at test_breaks.py:{line_of(Calls, 'what is called')} in forward"
    call = torch.compile(module, backend="cgpass") if compiled else module
    for _ in range(3 if compiled else 0):
        call(X)
    report = cgpass.explain(call, X, training=False)
    runs = "what torch/nn/modules/container.py runs"
    (found,) = (each for each in report.left_to_eager if each.place.startswith(runs))
    assert found.place.endswith(besides)
    assert found.reason.line.startswith(f"test_untold_breaks.py:{line_of(Says)} in forward: ")
    assert found.reason.fix.endswith("instead of calling a container of torch's")
    assert report.graph_breaks == ()
    if report.functions:  # torch 2.11 compiles nothing of a layer that logs
        assert "operators of compiled code" in str(report)
    if compiled:
        assert f"left to eager: {found.place}, because of test_untold" in cgpass.summary()


def test_a_function_of_nothing_but_a_break_is_told_of():
    def only_says(x):
        print("all of it", x.shape)  # noqa: T201  the line to name
        return x

    report = cgpass.explain(only_says, X, training=False)
    assert report.functions == ()
    (found,) = report.graph_breaks
    assert f"test_untold_breaks.py:{line_of(only_says)} in only_says: " in found.line
    assert "compiled nothing of it" not in str(report)
    assert "compiled nothing of it" not in html(report)


def training_step(model, optimizer, x):
    optimizer.zero_grad()  # clears
    loss = model(x).square().mean()
    loss.backward()  # goes back
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # steps
    return loss.item()  # reads


def test_every_break_of_a_training_step_is_named_and_what_is_torchs_own_is_to_be_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    report = cgpass.explain(training_step, model, optimizer, X)
    found = {each.line.rpartition("# ")[2]: each for each in report.all_graph_breaks}
    assert set(found) == {"clears", "goes back", "steps", "reads"}
    assert found["goes back"].fix == "leave it: the backward has graphs of its own"
    assert found["clears"].fix == "leave it: it launches little"
    assert found["steps"].fix == "leave it: torch compiles what is called there by itself"
    assert "in torch/optim/optimizer.py:" in found["steps"].detail
    lines = sorted(int(each.line.split(":")[1].split(" ")[0]) for each in found.values())
    shown = ", ".join(f"test_untold_breaks.py:{line}" for line in lines)
    assert f"graph breaks at 4 lines ({shown})" in " ".join(str(report).split())
    assert any(f.place.startswith("torch/optim/adam") for f in report.functions)


def helper(x):
    return x.mean().item()  # in the helper


def calls_twice(x):
    x = x.sin().cos().exp().tanh()
    a = helper(x)  # the first call
    x = x.sin().cos().exp().tanh()
    b = helper(x)  # the second call
    return x.sin().cos().exp().tanh() * (a + b)


def test_a_break_in_a_helper_names_the_call_that_led_to_it():
    report = cgpass.explain(calls_twice, X, training=False)
    details = [f.graph_break.detail for f in report.functions if f.graph_break is not None]
    for which in ("the first call", "the second call"):
        at = f", reached from test_untold_breaks.py:{line_of(calls_twice, which)} in calls_twice"
        assert sum(detail.endswith(at) for detail in details) == 1
    assert "graph breaks at 1 line" in str(report)


def test_breaks_of_other_backends_and_of_libraries_are_not_ours():
    @contextlib.contextmanager
    def noting():
        before = len(torch_private.graph_breaks())
        yield found
        found.extend(torch_private.graph_breaks()[before:])

    found = []
    with noting():
        torch.compile(first_reads, backend="eager")(X, torch.tensor(1))
    assert found == []

    def logs(x):
        x = x.sin().cos().exp().tanh()
        log.warning("%s", x.mean().item())
        return x.sin().cos().exp().tanh()

    report = cgpass.explain(logs, X, training=False)
    assert report.graph_breaks == ()


SCRIPT = """
import torch
from tests.report import test_untold_breaks as given

first = torch.compile(given.first_reads, backend="cgpass")
container = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), given.Says(print)), backend="cgpass")
for _ in range(10):
    {calls}
"""


@pytest.mark.parametrize(
    ("calls", "status", "said"),
    [
        (
            "first(given.X, torch.tensor(1))",
            0,
            "graph breaks at 1 line (test_untold_breaks.py:{line}): what runs there",
        ),
        (
            "container(given.X)",
            1,
            "left to eager: what torch/nn/modules/container.py runs besides, because of",
        ),
    ],
)
def test_check_tells_of_them_and_fails_for_what_is_left_to_eager(
    calls, status, said, tmp_path, capsys
):
    (tmp_path / "script.py").write_text(SCRIPT.format(calls=calls))
    saved = tmp_path / "all.json"
    assert command.main(["check", "--save", str(saved), str(tmp_path / "script.py")]) == status
    out = capsys.readouterr().out
    assert said.format(line=line_of(first_reads)) in out
    assert command.main(["report", str(saved), "-o", "-"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert said.format(line=line_of(first_reads))[:60] in shown


def test_check_of_a_script_that_only_breaks_names_the_line(tmp_path):
    script = "import torch\n\ndef only(x):\n    print('all of it')\n    return x\n\n"
    script += (
        "torch.compile(only, backend='cgpass', options={'driver': 'simulated'})(torch.ones(3))\n"
    )
    (tmp_path / "script.py").write_text(script)
    line = [sys.executable, "-m", "cgpass", "check", str(tmp_path / "script.py")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = "nothing was compiled by cgpass: graph breaks at 1 line (script.py:4) left nothing to compile"
    assert expected in " ".join(done.stdout.split())


class Sometimes(nn.Module):
    """Says something unless it is told not to."""

    def __init__(self, says=True, late=False):
        super().__init__()
        self.layer, self.says, self.late = nn.Linear(4, 4), says, late

    def forward(self, x):
        x = x.sin().cos().exp().tanh() if self.late else x
        if self.says:
            print("says")  # noqa: T201  the line to name
        return self.layer(x).sin().cos().exp().tanh()


def breaks_of(call, training=False):
    report = cgpass.explain(call, X, training=training)
    return [each.line.partition(" in ")[0] for each in report.all_graph_breaks]


NAMED = [f"test_untold_breaks.py:{line_of(Sometimes)}"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_break_that_is_there_no_more_is_not_named(late, compiled):
    module = Sometimes(late=late)
    call = torch.compile(module, backend="cgpass") if compiled else module
    for _ in range(3):
        call(X)
    assert breaks_of(call) == NAMED
    module.says = False
    assert breaks_of(call) == []
    module.says = True
    assert breaks_of(call) == NAMED


def test_a_break_of_another_module_of_the_class_is_not_named():
    says, silent = (torch.compile(Sometimes(each), backend="cgpass") for each in (True, False))
    for _ in range(3):
        says(X), silent(X)
    assert breaks_of(silent) == []
    assert breaks_of(says) == NAMED
    assert breaks_of(Sometimes(False)) == []


def test_a_break_in_training_alone_is_not_named_in_evaluation():
    class InTraining(Sometimes):
        def forward(self, x):
            self.says = self.training
            return super().forward(x)

    module = InTraining()
    call = torch.compile(module, backend="cgpass")
    call(X).sum().backward()
    module.eval()
    assert breaks_of(call) == []
    module.train()
    assert breaks_of(call, training=True) == NAMED


def test_a_break_from_before_a_reset_is_not_named():
    """Torch numbers what it compiles anew, so that another compilation has the number of the old one."""
    module = Sometimes()
    with torch.no_grad():  # as explain calls it
        torch.compile(module, backend="cgpass")(X)
        torch.compiler.reset()
        module.says = False
        call = torch.compile(module, backend="cgpass")
        call(X)
    assert breaks_of(call) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_break_of_the_first_call_alone_is_not_named(late):
    class Once(Sometimes):
        def forward(self, x):
            x = x.sin().cos().exp().tanh() if late else x
            if self.says:
                print("says")  # noqa: T201
                self.says = False
            return self.layer(x).sin().cos().exp().tanh()

    assert breaks_of(Once()) == []


def test_a_break_in_another_thread_is_named():
    call = torch.compile(Sometimes(), backend="cgpass")

    def in_a_thread(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(call(x)))
        thread.start()
        thread.join()
        return found[0]

    assert breaks_of(torch.compiler.disable(in_a_thread)) == NAMED


def test_a_profiler_that_a_call_begins_goes_on():
    calls = []

    def profile(*event):
        calls.append(event[1])

    @torch.compiler.disable
    def begins():
        sys.setprofile(profile)

    def fn(x):
        begins()
        return x.sin().cos().exp().tanh()

    try:
        cgpass.explain(fn, X, training=False)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_a_backend_of_the_users_own_is_not_ours():
    torch.compile(Sometimes(), backend=lambda gm, inputs: gm)(X)
    assert torch_private.graph_breaks() == []
    assert cgpass.summary() == "no graph was compiled"


def test_a_break_whose_graph_is_counted_only_is_not_told_of_without_it(monkeypatch):
    monkeypatch.setattr(telemetry, "GRAPHS_KEPT", 2)
    torch.compile(Sometimes(late=True), backend="cgpass")(X)
    torch.compile(tries, backend="cgpass")(X)
    for n in range(3):
        torch.compile(eval(f"lambda x: x.sin().cos().exp() + {n}"), backend="cgpass")(X)
    assert "graph break" not in cgpass.summary()
