"""`torch._dynamo.utils.counters["cgpass"]`."""

import collections
import pickle

import pytest
import torch
from torch._dynamo.utils import counters

import cgpass
from cgpass.telemetry.live_counter import LiveCounter


@pytest.fixture
def counts():
    return {"calls": 2, "replays": 1}


@pytest.fixture
def counter(counts):
    return LiveCounter(lambda: counts)


def test_it_says_what_is_counted_whenever_it_is_read(counter, counts):
    assert counter["calls"] == 2
    counts["calls"] = 7
    assert counter["calls"] == counter.get("calls") == 7
    assert dict(counter) == counter == {"calls": 7, "replays": 1}
    assert list(counter) == list(counter.keys()) == ["calls", "replays"]
    assert list(counter.values()) == [7, 1]
    assert counter.total() == 8
    assert counter.most_common(1) == [("calls", 7)]
    assert len(counter) == 2
    assert "calls" in counter


def test_what_nobody_counts_is_zero(counter):
    assert counter["nothing"] == 0
    assert counter.get("nothing", 3) == 3
    assert "nothing" not in counter


def test_cleared_it_counts_from_there(counter, counts):
    counter.clear()
    assert counter == {"calls": 0, "replays": 0}
    counts["calls"] += 3
    assert counter == {"calls": 3, "replays": 0}


def test_a_copy_stays_as_it_is(counter, counts):
    copies = counter.copy(), pickle.loads(pickle.dumps(counter))
    counts["calls"] += 1
    for copy in copies:
        assert type(copy) is collections.Counter
        assert copy == {"calls": 2, "replays": 1}
    assert repr(counter) == "Counter({'calls': 3, 'replays': 1})"


def test_torch_lists_it_and_may_drop_it():
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    call = torch.compile(torch.sin, backend="cgpass", options=options)
    counters.clear()
    for _ in range(3):
        call(torch.ones(2))
    shown = counters["cgpass"]
    assert set(shown) == set(cgpass.counters())
    before = shown["replays"]
    call(torch.ones(2))
    assert counters["cgpass"]["replays"] == before + 1
    counters.clear()
    assert counters["cgpass"]["replays"] == 0
    torch.compiler.reset()
    counters.clear()
    torch.compile(torch.sin, backend="cgpass", options=options)(torch.ones(3))
    assert (counters["cgpass"]["warmups"], counters["cgpass"]["replays"]) == (1, 0)
    torch.compiler.reset()
