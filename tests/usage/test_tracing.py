"""`TORCH_TRACE`: what is in torch's structured trace, read line by line and by tlparse; the INFO log; the profiler's ranges."""

import contextlib
import json
import logging

import pytest
import torch
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter
from torch.profiler import ProfilerActivity, profile

from cgpass.runtime.executor import Executor

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
    torch.compiler.reset()
    fn = torch.compile(histogram, backend="cgpass", options={**OPTIONS, "on_skip": "silent"})
    w = torch.nn.Parameter(torch.ones(4, 4))
    kept = w.data
    for _ in range(3):
        fn(torch.ones(4, 4), w).backward()
    w.data = torch.ones(4, 4)
    for _ in range(2):
        fn(torch.ones(4, 4), w).backward()
    del kept
    torch.compiler.reset()


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
    assert head.startswith("forward of test_tracing.py:")
    assert head.endswith(": 2 partitions captured (16 operators), 1 eager (1 operator)")
    assert reason.startswith("  eager_1: aten.histc.default at test_tracing.py:")
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
    assert first["warm_up_ms"] > 0
    assert "stack" not in metadata
    assert metadata["attempt"] == 0
    plan, _ = found["cgpass_forward_plan"]
    assert metadata["frame_id"] == plan["frame_id"]
    _, payload = found["cgpass_forward_captured_0_recording_2"]
    moved = json.loads(payload)
    assert moved["cause"] == "moved"
    assert "w (float32[4, 4], read at test_tracing.py" in moved["detail"]


def test_a_line_for_each_graph_and_each_recording(caplog):
    with caplog.at_level(logging.INFO, logger="cgpass"):
        train()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    place = lines[-1].partition(" of ")[2].partition(":")[0]
    assert place == "test_tracing.py"
    compiled = [line for line in lines if " captured (" in line]
    assert [line.split(" of ")[0] for line in compiled] == ["forward", "backward"]
    (moved,) = [line for line in lines if " made: moved" in line]
    assert moved.startswith("forward captured_0 of test_tracing.py:")
    assert "in histogram: recording 2 made: moved: w (flo" in moved


# ---- partitions as named ranges of the profiler's traces


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
    assert "test_tracing.py:" in found[0]
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
