"""`torch._dynamo.utils.counters["cgpass"]`."""

import collections
import copy
import pickle

import torch
from torch._dynamo.utils import counters

import cgpass
from cgpass.telemetry.live_counter import LiveCounter


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
    assert counters["cgpass"]["replays"] == shown.get("replays") == before + 1
    counters.clear()
    assert counters["cgpass"]["replays"] == 0
    torch.compiler.reset()
    counters.clear()
    torch.compile(torch.sin, backend="cgpass", options=options)(torch.ones(3))
    assert (counters["cgpass"]["warmups"], counters["cgpass"]["replays"]) == (1, 0)
    torch.compiler.reset()


def test_it_says_what_is_counted_whenever_it_is_read(monkeypatch):
    counts = {"calls": 2, "replays": 1}
    monkeypatch.setattr(cgpass.telemetry, "counters", lambda: dict(counts))
    counter = LiveCounter()
    counts["calls"] = 7
    assert dict(counter) == counter == dict(counter.items()) == {"calls": 7, "replays": 1}
    assert (len(counter), "calls" in counter, counter["nothing"]) == (2, True, 0)
    kept = [counter.copy(), copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))]
    counter.clear()
    counts["calls"] += 3
    assert counter == {"calls": 3, "replays": 0}
    assert repr(counter) == "Counter({'calls': 3, 'replays': 0})"
    for each in kept:
        assert type(each) is collections.Counter
        assert each == {"calls": 7, "replays": 1}
