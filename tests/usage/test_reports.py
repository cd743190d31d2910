"""It tells you: `cgpass.summary()` and the counters, logs, traces, the profiler's ranges, `cgpass.verify`."""

import contextlib
import json
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter
from torch.profiler import ProfilerActivity, profile

import cgpass
from cgpass import telemetry
from cgpass.errors import CaptureError, OptionError, VerificationError
from cgpass.runtime.executor import Executor
from tests.operators import tagged, waits
from tests.usage import programs
from tests.usage.programs import MLP, Checkpointed, trained_on
from tests.usage.test_bad_input import compiled
from tests.usage.test_broken_drivers import frozen_rng, no_input_copy, no_write_back

pytestmark = pytest.mark.usefixtures("nothing_compiled_stays")
X = torch.ones(4)


class Breaks(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()  # of Breaks.forward
        return x.exp()


def summary_of(fn, **options):
    """Lines about the graphs of three calls, and what they added to the counters."""
    before = telemetry.counters()["graphs"]
    call = compiled(fn, **options)
    with programs.counted() as counters:
        for _ in range(3):
            assert torch.equal(call(X), fn(X))
    graphs = [str(graph.summary) for graph in telemetry.graphs(before)]
    return "\n".join(graphs).splitlines(), counters


def long_unsafe(x):
    return tagged(tagged((x * 2).sin().cos().tanh()).cos().sin()) + 1


def test_operators_that_are_too_small_a_partition_have_their_reason():
    (head, first, second, third), counters = summary_of(long_unsafe, on_skip="silent")
    line = long_unsafe.__code__.co_firstlineno + 1
    assert head == (
        f"inference of test_reports.py:{line} in long_unsafe: 1 partition captured (4 operators), 1 eager (5 operators)"
    )
    assert first.startswith(f"  eager_1: tests.tagged.default at test_reports.py:{line} in")
    assert "[cudagraph_unsafe]" in first
    assert (
        "its partition would hold 2 operators that do work on the device (views don't count), min_partition_ops is 4 "
        "[too_small]"
    ) in second
    assert second.endswith("set min_partition_ops to 2 or less to capture it (and 1 more)")
    assert "its partition would hold 1 operator that does work on the device" in third
    assert third.endswith("set min_partition_ops to 1 to capture it")
    assert (counters["skips"], counters["partitions_eager"]) == (1, 1)


def test_a_graph_that_launches_nothing_is_no_skip(caplog):
    with caplog.at_level(logging.INFO, "cgpass"):
        (line, *_), counters = summary_of(lambda x: x.view(2, 2).T)
    assert line.endswith("(2 operators): it launches no work on the device")
    assert counters["skips"] == counters["plain_calls"] == counters["replays"] == 0
    (record,) = [r for r in caplog.records if "runs without CUDA graphs" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("inference of test_reports.py:")


def test_calls_that_ran_without_a_graph_are_named():
    call = compiled(lambda x: x.sin().cos().exp().tan(), max_recordings=1)
    for size in (4, 5, 6):
        x = torch.ones(size)
        torch._dynamo.mark_dynamic(x, 0)
        for _ in range(3):
            call(x)
    *_, head, line, _ = cgpass.summary().splitlines()
    assert head.endswith("1 partition captured (4 operators), 0 eager (0 operators)")
    assert line.startswith("  captured_0: 6 of 9 calls ran without a graph: max_recordings=")
    assert line.endswith(
        " [max_recordings]; pad inputs to a few sizes, drop results, or raise max_recordings"
    )


@pytest.mark.parametrize("fn", [long_unsafe, lambda x: x.sin().cos() + 1, lambda x: tagged(x)])
def test_none_captures_nothing_and_has_nothing_to_say(fn, caplog):
    with caplog.at_level(logging.INFO, "cgpass"):
        (line, *_), counters = summary_of(
            fn, driver="none", on_skip="raise", unsafe_ops=("aten::linear",)
        )
    assert line.endswith('driver="none" turns them off')
    assert "runs without CUDA graphs (" in line
    changed = {name: count for name, count in counters.items() if count}
    assert changed == {"graphs": 1}
    assert not [r for r in caplog.records if r.name.startswith("cgpass") and r.levelno > 20]


def refusal(call):
    with pytest.raises(CaptureError) as error:
        call(X)
    return str(error.value)


def test_a_partition_whose_calls_are_refused_is_not_shown_as_captured():
    before = telemetry.counters()
    call = compiled(lambda x: waits(x.sin().cos().exp().tan()) + 1, on_skip="raise")
    with programs.counted() as counters:
        call(X)
        for _ in range(3):
            message = refusal(call)
    assert 'can\'t be captured as a whole, and on_skip="raise" refuses its calls' in message
    assert 'with "warn" all but this would be captured: tests.waits.default at test_re' in message
    assert ": call = compiled(lambda x: waits(x.sin().cos().exp().tan()) + 1" in message
    assert (counters["calls"], counters["warmups"], counters["skips"]) == (4, 1, 1)
    assert counters["partitions_captured"] == 0
    (graph,) = telemetry.graphs(before["graphs"])
    head, reason = str(graph.summary).splitlines()
    assert head.endswith("0 partitions captured (0 operators), 1 eager (6 operators)")
    assert reason.startswith("  captured_0: tests.waits.default at test_reports.py:")
    assert ': on_skip="raise" refuses its calls: capturing it failed (' in reason
    cgpass.reset()
    (graph,) = telemetry.graphs(before["graphs"])
    assert str(graph.summary).endswith("1 partition captured (6 operators), 0 eager (0 operators)")
    call(X)
    assert refusal(call) == message


def test_a_reset_leaves_out_graph_breaks_of_what_is_not_called_again():
    options = {"driver": "simulated", "compiler": "eager"}

    def breaks(x):
        torch._dynamo.graph_break()
        return x.sin()

    first = torch.compile(breaks, backend="cgpass", options=options)
    second = torch.compile(lambda x: x.cos(), backend="cgpass", options=options)
    module = torch.compile(
        torch.nn.Sequential(Breaks(), torch.nn.Linear(4, 4)), backend="cgpass", options=options
    )
    for call in (first, second, module):
        call(X)
    assert cgpass.summary().count("torch._dynamo.graph_break()") > 2
    cgpass.reset()
    assert cgpass.summary() == "no graph was compiled"
    second(X)
    assert "graph break" not in cgpass.summary()
    for call, code in (
        (first, "in breaks: torch._dynamo.graph_break()"),
        (module, "of Breaks.forward"),
    ):
        cgpass.reset()
        call(X)
        assert code in cgpass.summary()


def many_options(fn, *args):
    for number in range(10):
        options = {"driver": "simulated", "compiler": "eager", "max_recordings": number + 1}
        torch.compile(fn(), backend="cgpass", options=options)(*args)


def one_more(x):
    return x.sin() + 1


@pytest.mark.parametrize(
    ("fn", "place"),
    [
        (lambda: one_more, f"test_reports.py:{one_more.__code__.co_firstlineno} in one_more"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)),
            "modules of torch's own classes and functions under its decorators (they count as one, here module Sequential)",
        ),
    ],
)
def test_the_recompile_limit_is_named(fn, place):
    many_options(fn, X)
    said = (
        "it was compiled 8 times, as often as torch._dynamo.config.recompile_limit allows; the guard that failed last: "
        "backend or options were others. Calls that no compiled version fits run in eager"
    )
    head, *lines = cgpass.summary().splitlines()
    assert head.startswith("8 times: ")
    (line,) = [each for each in lines if "left to eager" in each]
    assert line == (
        f"left to eager: {place}: {said} [recompile_limit]; compile it once, for one backend and with one set of options, or call "
        "torch.compiler.reset() before you change them"
    )
    (left,) = cgpass.explain(fn(), X).left_to_eager
    assert (left.rest, left.detail, left.is_earlier) == (place, said, True)
    torch.compiler.reset()
    assert cgpass.summary() == "no graph was compiled"


# ---- `TORCH_TRACE`: what is in torch's structured trace, read line by line and by tlparse; the INFO log

OPTIONS = {"driver": "simulated", "compiler": "eager"}


@contextlib.contextmanager
def traced(directory):
    """As with `TORCH_TRACE=directory`."""
    handler = LazyTraceHandler(str(directory))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    log = logging.getLogger("torch.__trace")
    level = log.level
    log.setLevel(logging.DEBUG)
    logging.Logger.addHandler(log, handler)  # past what keeps pytest's own away
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        handler.close()


def entries(directory):
    """Metadata and payload of each entry."""
    (path,) = directory.glob("*.log")
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            found.append((json.loads(line.partition("] ")[2]), []))
    return [(metadata, "\n".join(payload)) for metadata, payload in found]


def histogram(x, w):
    x = (x * 2).sin().cos().tanh() @ w
    x = x * torch.histc(x.detach(), 8).max()  # reads on the host
    return (x.sin().cos() + 1).tanh().sum()


def train():
    """Two recordings of the forward's first partition: a parameter moves."""
    fn = torch.compile(histogram, backend="cgpass", options={**OPTIONS, "on_skip": "silent"})
    w = torch.nn.Parameter(torch.ones(4, 4))
    kept = w.data
    for _ in range(3):
        fn(torch.ones(4, 4), w).backward()
    w.data = torch.ones(4, 4)
    for _ in range(2):
        fn(torch.ones(4, 4), w).backward()
    del kept


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trace")
    with traced(directory):
        train()
    return directory


def artifacts(directory):
    return {
        metadata["artifact"]["name"]: (metadata, payload)
        for metadata, payload in entries(directory)
        if metadata.get("artifact", {}).get("name", "").startswith("cgpass_")
    }


def test_graphs_before_and_after_each_pass_that_changed_them(trace):
    found = artifacts(trace)
    assert [name for name in found if name.startswith("cgpass_graph_forward")] == [
        "cgpass_graph_forward_0_before",
        "cgpass_graph_forward_2_partition",
        "cgpass_graph_forward_outlined",
    ]
    _, before = found["cgpass_graph_forward_0_before"]
    _, after = found["cgpass_graph_forward_2_partition"]
    assert "aten.histc.default" in before
    assert "# eager_1" in after
    assert not [name for name in found if "lift_cpu_scalars" in name]


def test_plans(trace):
    metadata, plan = artifacts(trace)["cgpass_forward_plan"]
    assert metadata["artifact"]["encoding"] == "string"
    head, reason = plan.splitlines()
    assert head.startswith("forward of test_reports.py:")
    assert head.endswith(": 2 partitions captured (16 operators), 1 eager (1 operator)")
    assert reason.startswith("  eager_1: aten.histc.default at test_reports.py:")
    assert "without a range it reads the smallest and largest value on the host [host_" in reason
    assert "cgpass_backward_plan" in artifacts(trace)


def test_recordings_with_cause_and_duration_under_their_compilation(trace):
    found = artifacts(trace)
    metadata, payload = found["cgpass_forward_captured_0_recording_1"]
    first = json.loads(payload)
    assert (first["cause"], first["recording"], first["partition"]) == (
        "first",
        1,
        "forward captured_0",
    )
    assert first["record_ms"] > 0
    assert "stack" not in metadata
    assert metadata["attempt"] == 0
    plan, _ = found["cgpass_forward_plan"]
    assert metadata["frame_id"] == plan["frame_id"]
    _, payload = found["cgpass_forward_captured_0_recording_2"]
    moved = json.loads(payload)
    assert moved["cause"] == "moved"
    assert "w (float32[4, 4], read at test_reports.py" in moved["detail"]


def test_a_line_for_each_graph_and_each_recording(caplog):
    with caplog.at_level(logging.INFO, logger="cgpass"):
        train()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    place = lines[-1].partition(" of ")[2].partition(":")[0]
    assert place == "test_reports.py"
    compiled = [line for line in lines if " captured (" in line]
    assert [line.split(" of ")[0] for line in compiled] == ["forward", "backward"]
    (moved,) = [line for line in lines if " made: moved" in line]
    assert moved.startswith("forward captured_0 of test_reports.py:")
    assert "in histogram: recording 2 made: moved: w (flo" in moved


@pytest.fixture
def session(setting):
    return setting.session(on_skip="silent")


def ranges(events):
    return [e.name for e in events if e.name.startswith("cgpass: ")]


def test_each_partition_is_a_range_of_forward_and_backward(session, tmp_path):
    call = session.compile(histogram)
    x, w = session.randn(4, 4).requires_grad_(), session.randn(4, 4)
    for _ in range(2):
        call(x, w).backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        call(x, w).backward()
    found = ranges(prof.events())
    assert [name.partition(" of ")[0] for name in found] == [
        "cgpass: forward captured_0",
        "cgpass: forward eager_1",
        "cgpass: forward captured_2",
        "cgpass: backward captured_0",
    ]
    assert found[0].endswith("in histogram")
    assert "test_reports.py:" in found[0]
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    shown = {e["name"]: e for e in events if e.get("ph") == "X"}
    assert shown[found[0]]["dur"] > 0


def test_a_wrapper_is_a_range(session):
    call, x = session.wrap(torch.sin, name="mine"), session.randn(4)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        call(x)
    assert ranges(prof.events()) == ["cgpass: mine"]


def test_nothing_is_named_while_nobody_profiles(session, monkeypatch):
    monkeypatch.setattr(Executor, "_named_steps", pytest.fail)
    call, x = session.compile(histogram), session.randn(4, 4)
    for _ in range(3):
        call(x, x)


# ---- `cgpass.verify`: replays are compared with plain runs, and what is wrong is named


def recomputed():
    """Draws, writes a buffer, and is recomputed."""

    def layer():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))

    return nn.Sequential(Checkpointed(layer), nn.BatchNorm1d(8))


@pytest.mark.parametrize("rng", ["exact", "paired"])
def test_what_is_right_passes_and_stays_as_it_is(way, rng):
    trained = trained_on(recomputed, [(4, 8)] * 12)
    expected = way.run(trained, rng=rng)
    with cgpass.verify() as verification:
        checked = way.run(trained, rng=rng)
    assert verification.checked > 12
    assert all(map(torch.equal, expected, checked))


def inference(session):
    _, call = session.compiled(MLP)
    with torch.no_grad():
        return [call(batch).clone() for batch in session.batches(4, 8, count=6)]


def dropped_out(session):
    call = session.compile(lambda x: F.dropout(x.sin(), 0.5).cos().exp())
    return [call(batch) for batch in session.batches(4, 8, count=6)]


def written(session):
    call = session.compile(lambda x, y: x.mul_(2).add_(y.sin()).cos())
    return [call(x.clone(), x) for x in session.batches(4, 8, count=6)]


@pytest.mark.parametrize(
    ("break_it", "program", "named"),
    [
        (no_input_copy, inference, r"output 0 \(gelu_1 at programs.py:\d+ in forward"),
        (frozen_rng, dropped_out, r"random numbers were not drawn as without a graph"),
        (
            no_write_back,
            written,
            r"input x, which it writes, \(float32\[4, 8\]\) differs in 32",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_wrong_is_named(monkeypatch, break_it, program, named):
    setting = programs.Setting(torch.device("cpu"), "simulated")
    break_it(monkeypatch)
    with cgpass.verify(), pytest.raises(VerificationError) as error:
        setting.run(program)
    message = str(error.value)
    assert message.startswith("cgpass.verify: inference captured_0 of ")
    assert re.search(named, message), message


@torch.library.custom_op("verification::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Stands for kernels that add up in any order."""
    noise.calls += 1
    return x * noise.calls


noise.calls = 0
noise.register_fake(torch.empty_like)


def test_kernels_that_do_not_repeat_themselves_are_named_once(setting, caplog):
    def program(session):
        call = session.compile(lambda x: noise(x.sin()).cos().exp() + 1)
        return [call(batch) for batch in session.batches(4, 8, count=8)]

    with cgpass.verify():
        setting.run(program)
    (message,) = [r.getMessage() for r in caplog.records if "test_reports.py" in r.getMessage()]
    assert "runs without graphs differ among themselves" in message
    assert "test_reports.py" in message


def test_every_so_manieth_call_of_what_is_there_and_what_comes(setting):
    session = setting.session()
    _, early = session.compiled(MLP)
    with torch.no_grad():
        for _ in range(4):
            early(session.randn(4, 8))
        verification = cgpass.verify(every=3)
        for _ in range(9):
            early(session.randn(4, 8))
        assert verification.checked == 3
        _, late = session.compiled(MLP)
        for _ in range(9):
            late(session.randn(4, 8))
        assert verification.checked == 6
        verification.close()
        verification.close()
        for _ in range(9):
            early(session.randn(4, 8))
        assert verification.checked == 6


def test_what_the_loop_replays_is_what_is_verified(way):
    """Nobody else holds what a backward overwrites: it needs no other recording."""
    trained = trained_on(MLP, [(4, 8)] * 12)
    with cgpass.verify(every=3) as verification, programs.counted() as counters:
        way.run(trained, max_recordings=1)
    assert counters["recordings"] == 2
    assert counters["plain_calls"] == 0
    assert verification.checked == 8


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
def test_numbers_that_are_none(every):
    with pytest.raises(OptionError, match=r"cgpass.verify: every must be a positive int"):
        cgpass.verify(every=every)


def test_what_is_not_compared_is_named(caplog):
    x = torch.ones(2, 4)
    wrapped = cgpass.CUDAGraphWrapper(torch.sin, name="sine", options={"driver": "simulated"})
    with cgpass.verify():
        wrapped(x)
    assert "cgpass.verify: sine: only compiled functions are compared: not verified" in caplog.text
    caplog.clear()
    with cgpass.verify():
        pass
    assert "sine" not in caplog.text
