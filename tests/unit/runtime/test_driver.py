"""The CUDA driver without CUDA: its calls, and their order, on a device that does nothing."""

import ctypes
import dataclasses
import gc
import sys

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime.capturing import Pause
from cgpass.runtime.driver import CUDADriver
from tests.generators import FakeGenerator, State

DEVICE = torch.device("cuda", 0)


class Log(list):
    """Calls in their order; fakes note themselves here."""

    capturing = False


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"event of {self.name}"

    def query(self):
        return self.name in self.log.idle

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *exc):
        self.log.append(f"leave {self.name}")


class FakeGraph:
    log = None
    end_raises = False
    draws = None
    """A generator's state and how far a replay moves it."""

    def register_generator_state(self, generator):
        self.log.append(f"register {generator}")

    def replay(self):
        self.log.append("replay")
        if self.draws is not None:
            state, steps = self.draws
            self.log.drawn.append(dataclasses.replace(state))
            state.offset += steps

    def reset(self):
        self.log.append("reset")

    def capture_begin(self, *, pool="own pool", capture_error_mode):
        self.log.append(f"begin {pool} {capture_error_mode}")
        self.log.capturing = True

    def capture_end(self):
        self.log.append("end")
        self.log.capturing = False
        if self.end_raises:
            raise RuntimeError("capture_end")


class LoggedGenerator(FakeGenerator, torch.Generator):
    """Has a name, and notes which states it is given."""

    def __new__(cls, *args):
        return torch.Generator.__new__(cls)

    def __init__(self, log, name):
        super().__init__(State(0))
        self.log, self.name = log, name

    def __repr__(self):
        return self.name

    def clone_state(self):
        return f"state of {self.name}"

    def graphsafe_get_state(self):
        handle = LoggedGenerator(self.log, f"handle of {self.name}")
        handle._state = self._state
        return handle

    def graphsafe_set_state(self, state):
        self.log.append(f"restore {state}")


@pytest.fixture
def cuda(monkeypatch):
    """A driver whose device notes what is asked of it, and the notes."""
    log = Log()
    log.streams, log.idle, log.drawn = [11], [], []
    graph = type("Graph", (FakeGraph,), {"log": log})
    log.graph = graph
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 1))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(cuda, "Stream", lambda device: FakeStream(log, "side"))
    monkeypatch.setattr(
        cuda, "current_stream", lambda device: FakeStream(log, f"stream {log.streams[-1]}")
    )
    monkeypatch.setattr(cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(cuda, "device", lambda device: Pause())
    monkeypatch.setattr(cuda, "CUDAGraph", graph)
    monkeypatch.setattr(cuda, "default_generators", [LoggedGenerator(log, "default")])
    monkeypatch.setattr(
        torch_private, "clear_cublas_workspaces", lambda: log.append("clear workspaces")
    )
    monkeypatch.setattr(
        torch_private,
        "abandon_failed_capture",
        lambda index, pool: log.append(f"abandon {index} {pool}"),
    )
    monkeypatch.setattr(torch_private, "current_raw_stream", lambda index: log.streams[-1])
    monkeypatch.setattr(torch_private, "is_capturing", lambda: log.capturing)
    return CUDADriver(DEVICE), log


def test_a_capture(cuda):
    driver, log = cuda
    generator = LoggedGenerator(log, "mine")

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
def test_a_failed_capture_is_ended_leaves_its_pool_and_repairs_generators(pools, end_raises):
    driver, log = pools
    kept, _ = driver.record(lambda args: [], [], opaque=False)
    log.clear()
    log.graph.end_raises = end_raises
    with pytest.raises(ValueError, match="user's"):
        driver.record(failing, [LoggedGenerator(log, "mine")], opaque=False)
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
    log.graph.end_raises = False
    driver.record(lambda args: [], [], opaque=False)
    assert "begin (0, 2) thread_local" in log
    assert kept is not None


@pytest.mark.parametrize("raising", ["begin", "begin of the repair"])
def test_a_capture_that_a_signal_leaves_is_ended(cuda, raising, monkeypatch):
    driver, log = cuda

    def interrupted(self, **settings):
        begin(self, **settings)
        if ("pool" in settings) == (raising == "begin"):
            raise KeyboardInterrupt

    begin = log.graph.capture_begin
    fn = failing if raising == "begin of the repair" else lambda args: []
    monkeypatch.setattr(log.graph, "capture_begin", interrupted)
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
    assert first == State(1, 4)
    default._state = State(2, 8)
    graph.replay()
    assert (default.state, first) == (State(2, 12), State(1, 4))
    default._state = State(1, 4)  # stands where the other one does
    graph.replay()
    assert (default.state, first) == (State(1, 8), State(1, 4))
    default._state = first
    graph.replay()
    assert first == State(1, 8)
    assert log.drawn == [State(1, 0), State(2, 8), State(1, 4), State(1, 4)]


def test_a_graph_that_draws_nothing_asks_no_generator(cuda, monkeypatch):
    driver, log = cuda
    default = torch.cuda.default_generators[0]
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    default._state = State(2, 8)
    graph.replay()
    assert default.state == State(2, 8)
    monkeypatch.setattr(LoggedGenerator, "get_offset", lambda self: log.append("asked"))
    log.clear()
    graph.replay()
    assert log == ["replay"]


@pytest.fixture
def pools(cuda, monkeypatch):
    """The same, with the pools' handles in the log."""
    driver, log = cuda
    numbers = iter(range(1, 99))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty cache"))
    for name in ("begin_allocating_to_pool", "end_allocating_to_pool", "release_pool"):
        note = f"{name.split('_', maxsplit=1)[0]} {{}}"
        monkeypatch.setattr(
            torch_private, name, lambda device, pool, note=note: log.append(note.format(pool))
        )
    return driver, log


def of_pools(log):
    words = ("empty", "begin", "end (", "release")
    found = [line for line in log if line.startswith(words)]
    log.clear()
    return found


def test_warm_ups_have_a_pool_of_their_own_which_is_returned(pools):
    driver, log = pools
    for _ in range(2):
        driver.warm_up(lambda args: [], [])
    assert of_pools(log) == ["empty cache", *2 * ["begin (0, 1)", "end (0, 1)"]]
    first, _ = driver.record(lambda args: [], [], opaque=False)
    released = 2 * ["release (0, 1)"]
    assert of_pools(log) == [*released, "empty cache", "begin (0, 2) thread_local"]
    second, _ = driver.record(lambda args: [], [], opaque=False)
    assert of_pools(log) == ["empty cache", "begin (0, 2) thread_local"]
    third, _ = driver.record(lambda args: [], [], opaque=False)
    assert of_pools(log) == ["begin (0, 2) thread_local"]
    assert first is not second is not third


def test_live_blocks_are_those_in_use(pools, monkeypatch):
    driver, _ = pools
    states = ("active_allocated", "inactive", "active_allocated")
    blocks = [{"address": n, "size": 10 * n, "state": state} for n, state in enumerate(states)]
    monkeypatch.setattr(torch_private, "pool_segments", lambda handle: [{"blocks": blocks}])
    assert driver.live_blocks(0) == set()
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    assert driver.live_blocks(0) == {0, 2}
    del graph
    assert driver.live_blocks(0) == set()


@pytest.mark.parametrize("after", ["begin (", "end ("])
def test_a_signal_beside_a_warm_up_ends_its_allocations(pools, monkeypatch, after):
    driver, log = pools
    name = f"{after[:-2]}_allocating_to_pool"
    note, raised = getattr(torch_private, name), []

    def interrupted(device, pool):
        note(device, pool)
        if not raised:
            raised.append(1)
            raise KeyboardInterrupt

    monkeypatch.setattr(torch_private, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.warm_up(lambda args: [], [])
    assert of_pools(log)[-1] == "end (0, 1)"
    driver.end_warm_ups()


def test_after_a_warm_up_that_raises_the_caller_waits_for_what_it_launched(pools):
    driver, log = pools
    with pytest.raises(ValueError, match="user's"):
        driver.warm_up(failing, [])
    assert log.index("stream 11 waits for side") > log.index("begin (0, 1)")
    assert log[-1] == "leave side"
    driver.end_warm_ups()


def test_a_pool_that_is_given_serves_warm_ups_and_captures(pools):
    _, log = pools
    driver = CUDADriver(DEVICE, pool=(7, 7))
    driver.warm_up(lambda args: [], [])
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    warmed_up = ["empty cache", "begin (7, 7)", "end (7, 7)"]
    assert of_pools(log) == [*warmed_up, "begin (7, 7) thread_local", "release (7, 7)"]
    assert graph is not None


def test_a_snapshot_may_drop_references():
    """torch 2.11 drops one to each number of the pool's handle: each has one more."""
    pool = (70000, 70001)
    before = list(map(sys.getrefcount, pool))

    def snapshot(handle, *, include_traces):
        assert handle == pool
        assert not include_traces
        for number in handle:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return ["segment"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "memory_snapshot", snapshot)
        assert torch_private.pool_segments(pool) == ["segment"]
    assert list(map(sys.getrefcount, pool)) == before
