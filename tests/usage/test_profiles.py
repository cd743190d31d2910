"""Partitions as named ranges of `torch.profiler`'s traces."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cgpass.runtime.executor import Executor


def halves(x):
    x = x.sin().cos().tanh().exp()
    x = x * torch.histc(x.detach(), 8).max()  # reads on the host
    return x.sin().cos().tanh().exp()


@pytest.fixture
def session(setting):
    return setting.session(on_skip="silent")


def ranges(events):
    return [e.name for e in events if e.name.startswith("cgpass: ")]


def test_each_partition_is_a_range_of_forward_and_backward(session, tmp_path):
    call = session.compile(halves)
    x = session.randn(4, 4).requires_grad_()
    for _ in range(2):
        call(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        call(x).sum().backward()
    found = ranges(prof.events())
    assert [name.partition(" of ")[0] for name in found] == [
        "cgpass: forward captured_0",
        "cgpass: forward eager_1",
        "cgpass: forward captured_2",
        "cgpass: backward captured_0",
    ]
    assert found[0].endswith("in halves")
    assert "test_profiles.py:" in found[0]
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
    call, x = session.compile(halves), session.randn(4, 4)
    for _ in range(3):
        call(x)
