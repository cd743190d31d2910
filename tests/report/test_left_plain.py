"""What the summary, explain and the check say of a partition that was left plain since it is not worth a graph."""

import pytest
import torch

import cgpass
from cgpass import _torch
from cgpass.report import check
from cgpass.report.collect import snapshot
from cgpass.runtime import worth


@pytest.fixture(params=["by its copies", "by its replays"])
def policy(request, monkeypatch):
    """What leaves a partition plain, and why."""
    if request.param == "by its copies":
        monkeypatch.setattr(_torch, "memory_bandwidth", lambda device: 1.0)
        return "auto", "copying 4 MiB of inputs into its graph"
    monkeypatch.setattr(worth, "_time_plainly", lambda fn, args, written, device: 27.0)
    monkeypatch.setattr(worth, "_timed", lambda call, device: (call(), 98.0))
    why = "a replay takes 98 us and a plain call 27 us, as measured in its first calls"
    return "measured", why


def test_calls_of_what_is_left_plain_tell_that_reason_alone(
    simulated, counted_alone, policy, monkeypatch
):
    name, why = policy
    call = torch.compile(
        lambda x: (x * 2).sin().cos().tanh(), backend="cgpass", options={"capture_policy": name}
    )
    x = torch.ones(1 << 20)
    for _ in range(12):
        call(x)
    plain = cgpass.counters()["plain_calls"]
    assert plain > 3
    head, whole, calls, _ = cgpass.summary().splitlines()
    assert head.endswith("0 partitions captured (0 operators), 1 eager (4 operators)")
    assert whole.startswith(f"  captured_0: {why}")
    assert whole.endswith(" [not_worth_it]")
    assert calls.startswith(f"  captured_0: {plain} of 12 calls ran without a graph: {why}")
    assert calls.endswith(' [not_worth_it]; capture_policy="always" captures it')
    for word in ("[capture]", "[passing]", "unsafe_ops"):
        assert word not in cgpass.summary()

    ((part,),) = [graph.partitions for graph in snapshot().graphs]
    assert [(reason.code, part.captured) for reason in part.reasons] == [("not_worth_it", False)]
    assert check.work_done().fell_back == []

    cgpass.reset()  # it is captured again
    monkeypatch.setattr(worth.Judge, "is_given", lambda *given: True)
    for _ in range(12):
        call(x)
    work = check.work_done()
    assert work.fell_back == []
    assert "[not_worth_it]" in work.plain[-1]
