"""Partitions that are not worth capturing are left plain, for good."""

import ctypes
import itertools
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch

from cgpass import _torch
from cgpass.runtime import worth as module
from cgpass.runtime.recording import Recording
from cgpass.runtime.worth import Judge, worth
from cgpass.telemetry import CallStats
from tests.unit.runners import COPIED, STATIC, SYMINT, call, counts, runner

MB = 1 << 20


@pytest.fixture(autouse=True)
def one_megabyte_takes_two_microseconds(monkeypatch):
    monkeypatch.setattr(_torch, "memory_bandwidth", lambda device: MB * 1e6)


class Part:
    name = "captured_0"
    layout = SimpleNamespace(shape_key=lambda args: tuple(args))

    def __init__(self):
        self.owner = SimpleNamespace(driver=SimpleNamespace(device=torch.device("cpu")))
        self.stats = CallStats()
        self.calls, self.why = [], None

    def fn(self, args):
        self.calls.append(list(args))
        args.clear()
        return []

    def leave_plain(self, why):
        self.why = why


class Recorded:
    """Stands for a recording that was not replayed yet."""

    def __init__(self, run_us, copied_mb, read_mb, written):
        self.run_us, self.copied_bytes = run_us, copied_mb * MB
        self._read_mb, self.written = read_mb, frozenset(written)

    def bytes_read(self):
        return self._read_mb * MB

    @property
    def is_timed(self):
        return "run" in vars(self)


def recorded(run_us, copied_mb=0, read_mb=0, written=()):
    return Recorded(run_us, copied_mb, read_mb, written)


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (recorded(115), True),
        (recorded(115, copied_mb=24), True),  # 48 us against 100
        (recorded(115, copied_mb=101), False),  # 202 us against 100
        (recorded(0), True),  # nothing to weigh
        (recorded(0, copied_mb=1), True),
        (recorded(0, copied_mb=10), False),
        (
            recorded(115, copied_mb=101, read_mb=10),
            True,
        ),  # against 120: close, which a trial decides
        (recorded(115, copied_mb=300, read_mb=300), True),
    ],
)
def test_copies_are_weighed_against_launches(recording, expected):
    part = Part()
    assert worth("auto").is_given(part, recording, [1]) is expected
    assert (part.why is None) is expected
    assert worth("always").is_given(part, recorded(0, copied_mb=1), [1])


def test_only_the_first_recording_decides():
    part, judge = Part(), Judge(measures=False)
    assert judge.is_given(part, recorded(500), [1])
    assert judge.is_given(part, recorded(0, copied_mb=1000), [1])
    assert part.why is None


@pytest.mark.parametrize(
    ("policy", "copied_mb", "written", "timed"),
    [
        ("auto", 0, (), False),
        ("auto", 20, (), False),
        ("auto", 50, (), True),
        ("auto", 50, (0,), True),
        ("auto", 99, (), True),
        ("measured", 0, (), True),
        ("measured", 1000, (), True),
        ("measured", 0, (0,), True),
    ],
)
def test_what_is_close_is_timed(policy, copied_mb, written, timed):
    part, recording = Part(), recorded(115, copied_mb, written=written)
    assert worth(policy).is_given(part, recording, [1, 2])
    assert recording.is_timed is timed
    assert part.calls == []  # plain ones come with a replay that is compared


# ---- one recording after the other


@pytest.fixture
def times(monkeypatch):
    """What a plain call of each input and the next replays take, and what was replayed."""
    taken = SimpleNamespace(plain={}, replays=itertools.repeat(9.0), replayed=[])

    def replay(recording, args):
        taken.replayed.append(args)
        return args

    def time_plainly(fn, args, written, device):
        fn(list(args))
        return taken.plain[args[0]]

    monkeypatch.setattr(Recording, "run", replay)
    monkeypatch.setattr(Recorded, "run", replay, raising=False)
    monkeypatch.setattr(module, "_time_plainly", time_plainly)
    monkeypatch.setattr(module, "_timed", lambda call, device: (call(), next(taken.replays)))
    return taken


def replayed(judge, part, shape, count, **kwargs):
    """A recording that was replayed so often."""
    recording = recorded(115, **kwargs)
    assert judge.is_given(part, recording, [shape])
    for _ in range(count):
        assert recording.run([shape]) == [shape]
    return recording


@pytest.mark.parametrize(("policy", "copied_mb"), [("measured", 0), ("auto", 50)])
@pytest.mark.parametrize("plain_us", [8.0, 10.0])
def test_what_was_timed_goes_on_with_the_next_recording(times, policy, copied_mb, plain_us):
    part, judge, times.plain = Part(), worth(policy), {2: plain_us}
    for _ in range(2):
        replayed(judge, part, 2, 3, copied_mb=copied_mb)
        assert part.why is None
    last = replayed(judge, part, 2, 2, copied_mb=copied_mb)
    assert (part.why is not None) is (plain_us < 9)
    assert part.calls == [[2]]  # one shape, timed once
    last.run([2])
    assert not last.is_timed
    assert not replayed(judge, part, 2, 0).is_timed


def test_replays_are_compared_with_plain_calls_of_their_own_shape(times):
    """Against those of the first shape, all of the larger one's would lose."""
    part, judge, times.plain = Part(), worth("measured"), {2: 10.0, 3: 95.0}
    times.replays = iter([9.0, 90.0, 90.0, 9.0, 90.0])
    small, large = replayed(judge, part, 2, 1), replayed(judge, part, 3, 1)
    for recording, shape in ((small, 2), (large, 3), (large, 3), (small, 2), (large, 3)):
        recording.run([shape])
    assert part.why is None
    assert part.calls == [[2], [3]]
    part, judge = Part(), worth("measured")
    times.replays = iter([12.0, 96.0, 96.0, 500.0, 90.0])
    small, large = replayed(judge, part, 2, 1), replayed(judge, part, 3, 1)
    for recording, shape in ((small, 2), (large, 3), (large, 3), (small, 2), (large, 3)):
        recording.run([shape])
    assert part.why == "a replay takes 96 us and a plain call 95 us, as measured in its first calls"


def test_shapes_that_never_come_again_are_not_run_once_more(times):
    part, judge, times.plain = Part(), worth("measured"), {0: 10.0}
    for shape in range(1, 100):
        replayed(judge, part, shape, 1)
    replayed(judge, part, 0, 6)
    assert part.calls == [[0]]
    assert not replayed(judge, part, 0, 0).is_timed


def test_recordings_that_are_never_replayed_twice_are_decided_too(times):
    part, judge, times.plain = Part(), worth("measured"), {2: 8.0}
    for _ in range(module._FIRST_REPLAYS + module._REPLAYS - 1):
        replayed(judge, part, 2, 1)
    assert part.why is None
    replayed(judge, part, 2, 1)
    assert part.why is not None


def test_decisions_do_not_change(times):
    for plain_us, why in ((10.0, None), (8.0, "left plain")):
        part, judge, times.plain = Part(), worth("measured"), {2: plain_us, 3: 18.0 - plain_us}
        early = replayed(judge, part, 3, 1)
        replayed(judge, part, 2, 6)
        part.why = part.why and "left plain"
        for _ in range(20):
            early.run([3])
            replayed(judge, part, 3, 20)
        assert judge.is_given(part, recorded(0, copied_mb=1000), [3])
        assert judge.is_given(part, recorded(0, copied_mb=1000, written=(0,)), [3])
        assert part.why == why
        assert [3] not in part.calls


def test_what_decided_is_told(times, caplog):
    caplog.set_level(logging.INFO)
    for plain_us, stays in ((10.0, True), (8.0, False)):
        part, judge, times.plain = Part(), worth("measured"), {2: plain_us}
        replayed(judge, part, 2, module._REPLAYS)
        assert (judge.found, part.stats.trials) == (None, 0)  # the first one is not compared
        replayed(judge, part, 2, 1 + module._REPLAYS)
        found = f"a replay takes 9 us and a plain call {plain_us:.0f} us, as measured in its first calls"
        assert (judge.found, part.stats.trials) == (found, 1)
        assert ("stays captured" in caplog.text) == stays
        assert part.why == (None if stays else found)
        caplog.clear()
    assert worth("always").found is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_where_plain_calls_fail_it_stays_captured(times, monkeypatch, caplog, error):
    caplog.set_level(logging.INFO)

    def out_of_memory(fn, args, written, device):
        raise error("no memory, no workspace\nat line 3 of a kernel")

    monkeypatch.setattr(module, "_time_plainly", out_of_memory)
    part, judge = Part(), worth("measured")
    recording = replayed(judge, part, 2, 20)
    assert (part.why, recording.is_timed, len(times.replayed)) == (None, False, 20)
    said = "captured_0 stays captured, it can't be timed without a graph: no memory, no workspace"
    assert said in caplog.messages


def test_what_a_signal_raises_while_plain_calls_are_timed_is_the_users(times, monkeypatch):
    def interrupted(fn, args, written, device):
        raise TimeoutError("the limit of this step")

    monkeypatch.setattr(module, "_time_plainly", interrupted)
    with pytest.raises(TimeoutError, match="limit of this step"):
        replayed(worth("measured"), Part(), 2, 20)


def test_what_is_timed_keeps_no_recording_alive(times):
    part, judge = Part(), worth("measured")
    ref = weakref.ref(replayed(judge, part, 2, 1))
    assert ref() is None


# ---- whole partitions


def clock(monkeypatch, plain_us, replay_us):
    """Calls take what they are said to."""
    now = [0.0]
    run = Recording.run

    def replay(self, args):
        now[0] += replay_us * 1e-6
        return run(self, args)

    def fn(x, w):
        now[0] += plain_us * 1e-6
        return [x * w]

    monkeypatch.setattr(Recording, "run", replay)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return fn


def test_a_slower_partition_runs_plainly_from_then_on(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    fn = clock(monkeypatch, plain_us=100, replay_us=101)
    run = runner(fn, COPIED, STATIC, settings={"capture_policy": "measured"})
    w = torch.full((3,), 2.0)
    for number in range(12):
        assert call(run, torch.full((3,), float(number)), w) == [[2.0 * number] * 3]
    assert counts(run) == (1, 1, 1 + module._REPLAYS, 10 - module._REPLAYS)
    assert run.table.all() == []
    why = "a replay takes 101 us and a plain call 100 us, as measured in its first calls"
    assert run.failure == why
    assert (
        caplog.text.count(
            f"forward captured_0 is not worth capturing and runs without a graph from now on: {why}"
        )
        == 1
    )
    assert 'capture_policy="always" captures it' in caplog.text
    run.forget_failures()
    assert call(run, torch.ones(3), w) == [[2.0] * 3]
    assert run.stats.recordings == 2


def test_a_faster_partition_stays_captured(monkeypatch):
    run = runner(
        clock(monkeypatch, 100, 99), COPIED, STATIC, settings={"capture_policy": "measured"}
    )
    w = torch.full((3,), 2.0)
    kept = [call(run, torch.full((3,), float(n)), w) for n in range(30)]
    assert kept == [[[2.0 * n] * 3] for n in range(30)]
    assert counts(run)[2:] == (29, 0)
    (recording,) = run.table.all()
    assert "run" not in vars(recording)  # nothing is timed any more


def test_no_recording_of_any_shape_is_replayed_afterwards(monkeypatch):
    """Not even where memory is laid out anew no more, so that recordings stay."""
    fn = clock(monkeypatch, plain_us=100, replay_us=101)
    run = runner(lambda x, n: fn(x, n), COPIED, SYMINT, settings={"capture_policy": "measured"})
    monkeypatch.setattr(run.owner, "ask_to_start_over", lambda **given: None)
    for n in (2, 2, 2, 3, 3, 3, 4, 4, 4, 2, 3):
        assert call(run, torch.ones(3), n) == [[float(n)] * 3]
    before = run.stats.replays
    assert run.failure is not None
    for n in (2, 3, 4) * 4:
        assert call(run, torch.ones(3), n) == [[float(n)] * 3]
    assert run.stats.replays == before
    assert len(run.table.all()) == 3


def test_random_numbers_are_drawn_once(monkeypatch):
    results = []
    for policy in ("always", "measured"):
        run = runner(lambda x: [x + torch.rand(3)], COPIED, settings={"capture_policy": policy})
        torch.manual_seed(0)
        results.append([call(run, torch.zeros(3)) for _ in range(8)])
    assert results[0] == results[1]


@pytest.mark.parametrize("stays", [True, False])
def test_a_partition_that_writes_inputs_is_timed_on_copies_of_them(monkeypatch, stays):
    """A cache and how much of it is filled: calls that nobody made fill nothing, and each has the same room."""
    clocked = clock(monkeypatch, plain_us=102 if stays else 100, replay_us=101)
    filled = []

    def fn(x, cache, position):
        filled.append(ctypes.c_int64.from_address(position.data_ptr()).value)  # as no operator
        cache.index_copy_(0, position, x)
        position += 1
        return clocked(x, cache.sum(0))

    settings = {"capture_policy": "measured"}
    run = runner(fn, COPIED, STATIC, STATIC, mutated=(1, 2), settings=settings)
    cache, position = torch.zeros(3, 20).t(), torch.zeros(1, dtype=torch.int64)
    for number in range(20):
        total = (number + 1) * (number + 2) / 2 * (number + 1)
        assert call(run, torch.full((1, 3), number + 1.0), cache, position) == [[[total] * 3]]
    assert cache.tolist() == [[number + 1.0] * 3 for number in range(20)]
    assert position.item() == 20
    assert (run.stats.trials, run.stats.left_plain) == (1, not stays)
    assert (run.stats.plain_calls == 0) == stays
    assert filled[: 2 + module._PLAIN_CALLS] == [0, 1] + [2] * module._PLAIN_CALLS
