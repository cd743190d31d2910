"""What `cgpass.explain` reports, and that it leaves no trace."""

import gc
import itertools
import logging
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cgpass
from cgpass import telemetry
from cgpass.report import api, collect, measure
from cgpass.report.model import Report
from tests.usage.programs import counted

X = torch.linspace(-1, 1, 32).view(4, 8)


pytestmark = pytest.mark.usefixtures("simulated")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 2)

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu()))


@torch.library.custom_op("explained::host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("explained::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


host.register_fake(torch.empty_like)
waits.register_fake(torch.empty_like)


def split(x):
    return host((x * 2).sin().cos().exp()).sin().cos().tanh().exp()


def test_a_training_step(monkeypatch):
    ticks = itertools.count()  # a clock on which all takes some time, and as long as ever
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    report = cgpass.explain(Model(), X)
    (function,) = report.functions
    assert "test_explain.py:" in function.place
    assert function.driver == "simulated"
    forward, backward = function.graphs
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert (forward.calls_per_run, backward.calls_per_run) == (1, 1)
    assert report.settled
    assert report.runs == 5
    (part,) = forward.partitions
    assert [(each.name, each.num_bytes) for each in part.copied_inputs] == [("x", 128)]
    assert "test_explain.py:" in part.copied_inputs[0].line
    assert part.static_inputs == 9
    assert [each.cause for each in part.recordings] == ["first"]
    assert part.live_recordings == 1
    assert part.output_bytes > 0
    assert part.counts["replays"] == part.counts["calls"] - 1 == forward.calls - 1
    assert report.counted == "operators"
    assert report.work == (forward.num_ops + backward.num_ops,) * 2
    assert report.gpu_share is None


@pytest.fixture
def timed(monkeypatch):
    """As if simulated graphs were a measure of speed."""
    monkeypatch.setattr(collect, "_without_times", lambda report: report)


@pytest.mark.usefixtures("timed")
def test_a_training_step_is_timed():
    report = cgpass.explain(Model(), X)
    forward, backward = report.graphs
    for timed in (report, forward, backward, *forward.partitions, *backward.partitions):
        assert timed.ms > 0
        assert timed.plain_ms > 0
    assert forward.ms + backward.ms < report.ms


def test_simulated_graphs_are_no_measure_of_speed(tmp_path):
    report = cgpass.explain(split, X)
    assert '_ms": ' in report.to_json()
    assert set(re.findall(r'ms": (.*?),?$', report.to_json(), re.MULTILINE)) == {"null"}
    for path in (tmp_path / "report.txt", tmp_path / "report.html"):
        report.save(path)
        shown = path.read_text().partition("<main>")[2] or path.read_text()
        assert not re.search(r"\bms\b|\dx\b", shown)
        assert "of the 9 operators" in shown
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span class="soft">(.*?)<', shown)
    assert tiles == [
        ("88.9%", "of the 9 operators of compiled functions in graphs"),
        ("2 of 3", "partitions captured"),
        ("2", "recordings made"),
        ("256 B", "copied into graphs in each call"),
    ]
    assert Report.from_dict(report.to_dict()) == report


def test_inference_has_no_backward():
    seen = []

    def fn(x):
        seen.append(torch.is_grad_enabled())
        return model(x)

    model = torch.compile(Model().eval(), backend="cgpass")
    (function,) = cgpass.explain(fn, X, training=False).functions
    assert [graph.direction for graph in function.graphs] == ["inference"]
    assert set(seen) == {False}
    assert not model.training


@pytest.mark.usefixtures("timed")
def test_partitions_are_timed_each():
    (function,) = cgpass.explain(split, X).functions
    (graph,) = function.graphs
    assert [part.name for part in graph.partitions] == ["captured_0", "eager_1", "captured_2"]
    assert all(part.ms > 0 and part.plain_ms > 0 for part in graph.partitions)
    assert graph.ms == pytest.approx(sum(part.ms for part in graph.partitions))
    assert graph.partitions[1].counts == {}


@pytest.mark.usefixtures("timed")
def test_parts_of_a_partition_that_was_split_are_timed_and_counted():
    def fn(x):
        return waits((x * 2).sin().cos().exp()).sin().cos().tanh().exp()

    (graph,) = cgpass.explain(fn, X).functions[0].graphs
    names = [part.name for part in graph.partitions]
    assert names == ["captured_0", "eager_1", "captured_2"]
    assert all(part.ms > 0 for part in graph.partitions)
    assert graph.partitions[0].counts["replays"] > 0
    assert graph.partitions[1].reasons[0].code == "syncs"
    assert graph.calls_per_run == 1


def test_a_graph_that_runs_plainly_is_counted_and_timed():
    with cgpass.set_defaults(driver="none"):
        (function,) = cgpass.explain(split, X).functions
    (graph,) = function.graphs
    assert graph.skip == 'driver="none" turns them off'
    assert graph.ms > 0
    assert graph.calls_per_run == 1
    assert function.driver is None
    report = cgpass.explain(lambda x: host(x.sin()), X)
    assert "graphs take" not in str(report)
    (graph,) = report.graphs
    assert graph.reasons[0].code == "cudagraph_unsafe"
    assert report.work == (0, 2)


def test_layers_that_share_a_graph_count_as_often_as_they_run():
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    run = torch.compile(
        lambda layer, x: layer(x), backend="cgpass", options={"min_partition_ops": 1}
    )

    def fn(x):
        for layer in layers:
            x = run(layer, x)
        return x

    report = cgpass.explain(fn, X.clone().requires_grad_())
    assert [graph.calls_per_run for graph in report.graphs] == [2, 2]
    causes = [each.cause for each in report.graphs[0].partitions[0].recordings]
    assert causes == ["first", "other tensors"]


def test_the_loss_of_an_output_is_what_the_backward_begins_with():
    found = []
    model = Model()
    model.first.weight.register_hook(lambda grad: found.append(grad.clone()))

    def fn(x):
        out = model(x)
        return {"loss": out.sum() * 0, "logits": out}

    cgpass.explain(torch.compiler.disable(fn), X)
    assert found
    assert not any(grad.any() for grad in found)


def test_compiled_functions_run_as_they_are_and_stay_recorded():
    compiled = torch.compile(split, backend="cgpass", options={"unsafe_ops": ("aten::tanh",)})
    compiled(X)
    with counted() as counters:
        report = cgpass.explain(compiled, X)
    assert counters["graphs"] == 0
    names = [part.name for part in report.graphs[0].partitions]
    assert names == ["captured_0", "eager_1"]
    with counted() as counters:
        compiled(X)
    assert (counters["replays"], counters["recordings"]) == (1, 0)


def test_what_explain_compiled_itself_keeps_no_recordings():
    model = Model()
    cgpass.explain(model, X)
    assert not [
        live for _, _, live in api.live_runs() if live.owner and live.owner.has_recordings()
    ]


def test_nothing_is_kept_alive():
    before = {number for number, *_ in api.live_runs()}
    model = Model()
    alive = weakref.ref(model.first.weight)
    report = cgpass.explain(model, X)
    torch.compiler.reset()
    del model
    gc.collect()
    assert alive() is None
    assert report.graphs
    assert {number for number, *_ in api.live_runs()} <= before


def test_another_backend_leaves_nothing_to_report():
    report = cgpass.explain(torch.compile(split, backend="eager"), X)
    assert report.functions == ()
    assert report.work == (0, 0)
    text = " ".join(str(report).split())
    assert text.endswith(
        "Nothing here was compiled by cgpass. Either it is already compiled for another backend (pass the original module "
        "to explain), or torch.compile gave up on it earlier in this process (call torch.compiler.reset())."
    )


def test_reasons_in_a_sequential_name_the_module():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))
    with cgpass.set_defaults(unsafe_ops=("aten::addmm", "aten::gelu")):
        report = cgpass.explain(layers, X)
    reasons = [reason for graph in report.graphs for reason in graph.reasons]
    assert {reason.line for reason in reasons} <= {
        "module 0 (Linear)",
        "module 1.0 (GELU)",
        "module 1.1 (Linear)",
    }
    assert "aten.gelu.default at module 1.0 (GELU)\n" in str(report)
    assert "the same holds for aten.addmm.default (module 1.1 (Linear))" in str(report)


def test_a_backward_reads_parameters_in_place_though_its_forward_is_not_captured():
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with cgpass.set_defaults(unsafe_ops=("aten::gelu",)):
        report = cgpass.explain(layers, X.clone().requires_grad_())
    forward, backward = report.graphs
    (part,) = backward.partitions
    assert forward.skip is not None
    assert part.captured
    assert part.static_inputs == 2
    assert not [each.name for each in part.copied_inputs if "weight" in each.name]


def test_a_function_that_never_settles_says_so():
    numbers = iter(range(1000))

    def fn(x):
        return inner(x, next(numbers))

    inner = torch.compile(lambda x, n: (x + n).sin().cos().exp(), backend="cgpass", dynamic=True)
    report = cgpass.explain(fn, X)
    assert not report.settled
    assert "it did not settle: calls went on recording or compiling; of " in str(report)
    assert "in graphs if it settled: 100%" in str(report)
    assert "warm-up calls" in str(report)
    (part,) = report.graphs[-1].partitions
    (reason,) = part.reasons
    assert (part.recordings, reason.code) == ((), "new_shape")
    assert reason.op == "n"
    assert "has another value or layout in " in reason.detail
    assert "see the causes below" in " ".join(str(report).split())


def test_calls_that_are_compared_warn_of_nothing(caplog):
    with caplog.at_level(logging.WARNING, "cgpass"):
        cgpass.explain(Model(), X)
    assert not caplog.records


def test_telemetry_keeps_reasons_and_numbers_functions():
    before = telemetry.counters()["graphs"]
    cgpass.explain(split, X)
    graphs = telemetry.graph_runs()
    summary, runs = graphs[before]
    (reason,) = summary.partitions[1].why
    assert (reason.code, reason.op) == ("cudagraph_unsafe", "explained.host.default")
    assert str(reason) == summary.partitions[1].reasons[0]
    (run,) = runs
    assert list(run.parts) == ["captured_0", "captured_2"]
    cgpass.explain(lambda x: split(x) + 1, X)
    assert telemetry.graph_runs()[before + 1][0].function == summary.function + 1


@torch.compiler.disable
def beside(x):
    return x + 1


def test_functions_that_are_kept_from_being_compiled_are_no_compiled_ones():
    def fn(x):
        return beside((x * 2).sin().cos().exp())

    (graph,) = cgpass.explain(fn, X).graphs
    assert graph.partitions[0].captured


def test_names_without_a_value_are_no_hindrance():
    def fn(x):
        return (x * 2).sin().cos().exp() if x.shape else later(x)

    report = cgpass.explain(fn, X)
    assert report.graphs
    if not report:
        later = fn


def test_the_simulated_driver_shows_no_times_where_nothing_is_captured():
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager"}
    for fn in (lambda x: x.view(-1), lambda x: torch.histc(x.sin(), bins=4) * 2):
        report = cgpass.explain(fn, torch.ones(4), options=options)
        assert report.ms is None
        assert " ms" not in str(report)
    plainly = cgpass.explain(lambda x: x.view(-1), torch.ones(4), options={"driver": "none"})
    assert plainly.ms is not None
