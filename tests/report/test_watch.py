"""The clock of a watched block, on made-up time: what it records, and what its sample says of the whole."""

from types import SimpleNamespace

import pytest
import torch

from cgpass.report import watch
from cgpass.report.watch import _Clock
from cgpass.runtime.partition import PartitionRunner
from cgpass.telemetry import CallStats

SECOND = torch.device("cuda", 1)
MS = {"forward": 3.0, "eager": 1.0, "backward": 4.0}


class Device:
    """Time passes on it only where a test says so."""

    def __init__(self):
        self.now, self.events = 0.0, 0

    def event(self, device):
        assert device == SECOND
        self.events += 1
        at = self.now
        made = SimpleNamespace(at=at, synchronize=lambda: None)
        made.elapsed_time = lambda other: other.at - at
        return made


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(watch, "_event", device.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return device


class Loop:
    """A training loop: a forward with an eager partition, a backward, and every fourth time an optimizer of 2 ms."""

    def __init__(self, device, clock):
        self.device, self.stats, self.calls = device, CallStats(replays=1), 0
        self.runs = [clock._wrapped(0, SECOND, self.step(name), self.run(name)) for name in MS]

    def step(self, name):
        runner = PartitionRunner.__new__(PartitionRunner)
        runner.stats = self.stats
        return SimpleNamespace(name=name, run=print if name == "eager" else runner)

    def run(self, name):
        def run(values):
            self.device.now += MS[name]
            return values, None if name == "eager" else "a recording"

        return run

    def __call__(self, times):
        for _ in range(times):
            self.calls += 1
            for run in self.runs:
                run([])
            self.device.now += 2.0 * (self.calls % 4 == 0)


def test_an_event_is_recorded_on_the_device_of_the_graph(monkeypatch):
    found = []
    event = SimpleNamespace(record=lambda stream=None: found.append(stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    watch._event(SECOND)
    assert found == [SECOND]


def test_a_sample_of_calls_tells_the_share_inside_of_graphs(device):
    clock = _Clock()
    Loop(device, clock)(3000)
    clock.stop()
    assert device.events < 3000 / 3  # a step has three calls: six events, were all of them timed
    assert clock.parts == {(0, name): ms for name, ms in MS.items()}
    assert clock.in_graphs / clock.whole == pytest.approx(7 / 8.5, rel=0.02)


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_a_few_steps_are_timed_too(device, steps):
    clock = _Clock()
    Loop(device, clock)(steps)
    clock.stop()
    assert set(clock.parts) == {(0, name) for name in MS}
    assert 7 / 10 <= clock.in_graphs / clock.whole <= 7 / 8


def test_what_warms_up_or_is_recorded_is_no_sample(device):
    clock = _Clock()
    loop = Loop(device, clock)
    loop.stats.replays = 0
    loop(5)
    assert device.events == 0
    loop.stats.replays = 1

    def warms_up(values):
        loop.stats.warmups += 1
        device.now += 1000
        return values, None

    loop.runs[2:] = [clock._wrapped(1, SECOND, loop.step("new"), warms_up)]
    loop(5)
    clock.stop()
    assert clock.whole == 0
    assert not clock.parts


def test_what_is_compiled_in_a_period_ends_it(device):
    clock = _Clock()
    loop = Loop(device, clock)

    def compiles(values):
        clock.add(SimpleNamespace(live=lambda: None))
        loop.stats.recordings += 1
        device.now += 1000
        return values, "a recording"

    loop.runs[2] = clock._wrapped(0, SECOND, loop.step("backward"), compiles)
    loop(20)
    clock.stop()
    assert clock.whole == 0
    assert clock._period == []


def test_a_period_that_does_not_end_is_given_up(device):
    clock = _Clock()
    loop = Loop(device, clock)
    clock._wrapped(1, SECOND, loop.step("forward"), loop.run("forward"))([])  # called once
    loop(5000)
    clock.stop()
    assert device.events < 5000
    assert clock.in_graphs / clock.whole == pytest.approx(7 / 8.5, rel=0.05)


def test_a_long_block_is_timed_at_its_begin(device):
    clock = _Clock()
    loop = Loop(device, clock)
    loop(60_000)
    events = device.events
    assert 2 * watch._TIMED <= events < 3 * watch._TIMED
    loop(10_000)
    assert device.events == events
