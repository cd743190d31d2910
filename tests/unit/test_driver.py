"""What of the CUDA driver can be shown without CUDA: which calls it makes, in which order."""

import gc
from unittest import mock

import pytest
import torch

from cgpass.runtime import driver as driver_module
from tests.unit.fake_cuda import DEVICE, FakeGenerator


def test_a_capture(cuda):
    driver, log = cuda
    generator = FakeGenerator(log, "mine")

    def fn(args):
        log.append("run")
        assert not gc.isenabled()
        return (value for value in (1, 2))

    graph, outputs = driver.record(fn, [generator, 3], opaque=True)
    assert outputs == [1, 2]
    assert log == [
        "register mine",
        "side waits for stream 11",
        "enter side",
        "clear workspaces",
        "begin (0, 1) thread_local",
        "run",
        "end",
        "clear workspaces",
        "leave side",
        "stream 11 waits for side",
    ]
    log.clear()
    graph.replay()
    graph.reset()
    assert log == ["replay", "reset"]


def failing(args):
    raise ValueError("user's")


@pytest.mark.parametrize("end_raises", [False, True])
def test_a_failed_capture_is_ended_and_generators_are_repaired(cuda, end_raises):
    driver, log = cuda
    log.graph.end_raises = end_raises
    with pytest.raises(ValueError, match="user's"):
        driver.record(failing, [FakeGenerator(log, "mine")], opaque=False)
    after = log[log.index("end") + 1 : -2]
    repair = ["register mine", "begin own pool thread_local", "end"]
    if end_raises:
        assert after == [
            "abandon 0 (0, 1)",
            *repair,
            "restore state of default",
            "restore state of mine",
        ]
    else:
        assert after == repair
    assert log[-2:] == ["clear workspaces", "leave side"]
    assert gc.isenabled()


@pytest.mark.parametrize("raising", ["begin", "begin of the repair", "end"])
def test_a_capture_that_a_signal_leaves_is_ended(cuda, raising, monkeypatch):
    driver, log = cuda

    def interrupted(self, **settings):
        begin(self, **settings)
        if ("pool" in settings) == (raising == "begin"):
            raise KeyboardInterrupt

    def before_the_end():
        raise KeyboardInterrupt

    begin = log.graph.capture_begin
    fn = failing if raising == "begin of the repair" else lambda args: []
    if raising != "end":
        monkeypatch.setattr(log.graph, "capture_begin", interrupted)
    else:
        monkeypatch.setattr("cgpass.runtime.driver.time", mock.Mock(perf_counter=before_the_end))
    with pytest.raises(KeyboardInterrupt):
        driver.record(fn, [], opaque=False)
    assert log.index("end") < log.index("begin own pool thread_local")
    assert not log.capturing


def test_a_replay_waits_for_what_other_streams_may_still_read(cuda):
    driver, log = cuda
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    for number in (11, 22, 33, 11):
        log.streams.append(number)
        driver.enter_call()
    log.clear()
    graph.replay()
    assert log == ["stream 11 waits for stream 22", "stream 11 waits for stream 33", "replay"]
    log.clear()
    log.idle.append("stream 22")
    graph.replay()
    assert log == ["stream 11 waits for stream 33", "replay"]


def test_what_was_moved_is_read_on_other_streams(cuda):
    class Moved:
        def record_stream(self, stream):
            log.append(f"{stream.name} reads")

    driver, log = cuda
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    driver.enter_call()
    log.clear()
    graph.share([Moved()])
    assert log == []
    log.streams.append(22)
    driver.enter_call()
    log.clear()
    graph.share([Moved(), Moved()])
    assert log == ["stream 11 waits for event of stream 22", "stream 11 reads", "stream 11 reads"]


def test_a_users_capture_waits_for_no_stream_outside_of_it(cuda):
    driver, log = cuda
    driver.enter_call()
    log.streams.append(22)
    log.capturing = True
    driver.enter_call()
    assert log == []
    log.streams.append(11)
    log.capturing = False
    driver.enter_call()
    assert log == []


def test_a_graph_dropped_during_a_capture_is_destroyed_after_it(cuda):
    driver, log = cuda
    first, second = (driver.record(lambda args: [], [], opaque=False)[0] for _ in range(2))
    log.clear()

    def drops(args):
        nonlocal second
        first.reset()
        second = None
        assert "reset" not in log
        return []

    third, _ = driver.record(drops, [], opaque=False)
    assert log[-4:] == ["leave side", "reset", "reset", "stream 11 waits for side"]
    log.clear()
    first.reset()
    assert log == []
    del third
    assert log == ["reset"]


def test_a_replay_draws_from_the_state_that_the_default_generator_has_now(cuda):
    driver, log = cuda
    default = torch.cuda.default_generators[0]
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    first = default.state
    log.graph.draws = (first, 4)  # what is recorded stays with the state that there was
    default.manual_seed(1)
    graph.replay()
    assert first == [1, 4]
    default.state = [2, 8]
    graph.replay()
    assert default.state == [2, 12]
    assert first == [1, 4]
    default.state = [1, 4]  # stands where the other one does
    graph.replay()
    assert default.state == [1, 8]
    assert first == [1, 4]
    default.state = first
    graph.replay()
    assert first == [1, 8]


def test_a_graph_that_draws_nothing_asks_no_generator(cuda, monkeypatch):
    driver, log = cuda
    default = torch.cuda.default_generators[0]
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    default.state = [2, 8]
    graph.replay()
    assert default.state == [2, 8]
    monkeypatch.setattr(FakeGenerator, "get_offset", lambda self: log.append("asked"))
    log.clear()
    graph.replay()
    assert log == ["replay"]


@pytest.mark.gpu
def test_a_capture_on_the_device():
    driver = driver_module.CUDADriver(DEVICE)
    x = torch.ones(3, device=DEVICE)
    graph, (out,) = driver.record(lambda args: [args[0] * 2], [x], opaque=False)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [8] * 3
    with pytest.raises(RuntimeError):
        driver.record(lambda args: [args[0] * args[0].sum().item()], [x], opaque=False)
    graph, (out,) = driver.record(
        lambda args: [args[0] + torch.rand_like(args[0])], [x], opaque=False
    )
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    assert not driver.is_capturing()
