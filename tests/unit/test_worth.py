"""Partitions that are not worth capturing are left plain, for good."""

import logging
from types import SimpleNamespace

import pytest
import torch

from cgpass import _torch
from cgpass.runtime import worth as module
from cgpass.runtime.recording import Recording
from cgpass.runtime.worth import Judge, worth
from tests.unit.runners import COPIED, STATIC, call, counts, runner

MB = 1 << 20


@pytest.fixture(autouse=True)
def one_megabyte_takes_two_microseconds(monkeypatch):
    monkeypatch.setattr(_torch, "memory_bandwidth", lambda device: MB * 1e6)


class Part:
    def __init__(self):
        self.owner = SimpleNamespace(driver=SimpleNamespace(device=torch.device("cpu")))
        self.calls, self.why = [], None

    def fn(self, args):
        self.calls.append(list(args))
        args.clear()
        return []

    def leave_plain(self, why):
        self.why = why


def recorded(run_us, copied_mb=0, read_mb=0, written=()):
    return SimpleNamespace(
        run_us=run_us,
        copied_bytes=copied_mb * MB,
        bytes_read=lambda: read_mb * MB,
        written=frozenset(written),
        run=None,
    )


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (recorded(115), True),
        (recorded(115, copied_mb=24), True),  # 48 us against 100
        (recorded(115, copied_mb=101), False),  # 202 us against 100
        (recorded(0), True),  # no copies are no reason
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
        ("auto", 50, (0,), False),  # one call more would write once more
        ("auto", 99, (), True),
        ("measured", 0, (), True),
        ("measured", 1000, (), True),
        ("measured", 0, (0,), False),
    ],
)
def test_what_is_close_is_timed(policy, copied_mb, written, timed):
    part, recording = Part(), recorded(115, copied_mb, written=written)
    assert worth(policy).is_given(part, recording, [1, 2])
    assert (recording.run is not None) is timed
    assert part.calls == [[1, 2]] * (module._CALLS * timed)


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
    assert counts(run) == (1, 1, module._CALLS, 11 - module._CALLS)
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


def test_random_numbers_are_drawn_once(monkeypatch):
    results = []
    for policy in ("always", "measured"):
        run = runner(lambda x: [x + torch.rand(3)], COPIED, settings={"capture_policy": policy})
        torch.manual_seed(0)
        results.append([call(run, torch.zeros(3)) for _ in range(8)])
    assert results[0] == results[1]
