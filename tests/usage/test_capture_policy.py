"""Partitions that turn out to be slower captured are left plain, whatever is held or pending then."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import cgpass
from cgpass import _torch
from cgpass.runtime import worth
from tests.usage import programs
from tests.usage.programs import MLP, ReadsValue


@pytest.fixture(params=["all", "every other", "none"])
def slower(request, monkeypatch):
    """Which partitions turn out to be slower."""
    turn = itertools.count()
    patterns = {"all": [True], "every other": [True, False], "none": [False]}
    pattern = patterns[request.param]

    def timed(call, device):
        return call(), 1.0

    decide = worth.Trial._decide

    def decided(self, part):
        plain_us = 0.0 if pattern[next(turn) % len(pattern)] else 2.0
        self._times = [(replay_us, plain_us) for replay_us, _ in self._times]
        decide(self, part)

    monkeypatch.setattr(worth, "_timed", timed)
    monkeypatch.setattr(worth.Trial, "_decide", decided)
    return request.param


class Counts(MLP):
    """Writes a buffer: one call more would count once more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * self.seen


def training(make, *, hold):
    def program(session):
        module, call = session.compiled(make)
        values, held = [], []
        for batch in session.batches(4, 8, count=14):
            out = call(batch)
            out.square().mean().backward()
            values += [out.detach().clone(), *programs.gradients(module)]
            if hold:
                held.append(out)
            module.zero_grad(set_to_none=True)
        return [*values, *held]

    return program


@pytest.mark.parametrize(
    ("make", "hold"), [(MLP, False), (MLP, True), (ReadsValue, True), (Counts, False)]
)
def test_training_goes_on_with_the_same_numbers(way, slower, make, hold):
    counters = way.compare(training(make, hold=hold), capture_policy="measured")
    assert counters["trials"] >= 2, counters
    assert (counters["plain_calls"] > 0) is (slower != "none"), counters
    if slower == "none":
        assert counters["replays"] > 20


class Cache(torch.nn.Module):
    """Keys and how many there are: a call more would write further on, at last out of bounds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(16, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, x)
        self.position += 1
        self.scale.t().mul_(1.5)
        return (self.keys * self.scale).sum(0).tanh() * self.position


def test_what_is_written_is_written_once(way, slower):
    def program(session):
        module, call = session.compiled(Cache)
        values = []
        with torch.no_grad():
            for _ in range(16):
                values.append(call(session.randn(1, 8)).clone())
        return [*values, *module.buffers()]

    counters = way.compare(program, capture_policy="measured", min_partition_ops=1)
    assert counters["trials"] == 1
    assert counters["left_plain"] == (slower != "none")


def test_batch_statistics_count_each_call_once(way, slower):
    def program(session):
        module, call = session.compiled(
            lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        )
        values = []
        for batch in session.batches(4, 8, count=12):
            call(batch).square().mean().backward()
            values += programs.gradients(module)
            module.zero_grad(set_to_none=True)
        return [*values, *module.buffers()]

    counters = way.compare(program, capture_policy="measured", min_partition_ops=1)
    assert counters["trials"] == 2  # the forward, and the backward


def test_forwards_pending_while_it_is_decided(way, slower):
    def program(session):
        module, call = session.compiled(MLP)
        values, pending = [], []
        for batch in session.batches(4, 8, count=16):
            pending.append(call(batch))
            if len(pending) > 3:
                pending.pop(0).square().mean().backward()
                values += programs.gradients(module)
        for out in pending:
            out.square().mean().backward()
        return [*values, *programs.gradients(module)]

    way.compare(program, capture_policy="measured")


STEPS = 60


def moved(module, step):
    if step % 4 == 3:
        for p in module.parameters():
            p.data = p.data.clone()


def assigned(module, step):
    if step % 4 == 3:
        values = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(values, assign=True)


def untouched(module, step):
    del module, step


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop in which recordings are replaced before they were replayed often."""

    sizes: tuple[int, ...] = (4,)
    dynamic: bool | None = None
    zeroed: str = "last"
    kept: bool = False
    change: Callable[[MLP, int], None] = untouched

    def __call__(self, session):
        module, call = session.compiled(MLP, dynamic=self.dynamic)
        values, gradients = [], []
        for step in range(STEPS):
            self.change(module, step)
            out = call(session.randn(self.sizes[step % len(self.sizes)], 8))
            if self.zeroed == "between":
                module.zero_grad(set_to_none=True)
            out.square().mean().backward()
            values += [out.detach().clone(), *programs.gradients(module)]
            if self.kept:
                gradients += [p.grad for p in module.parameters()]
            if self.zeroed == "last":
                module.zero_grad(set_to_none=True)
        return [*values, *gradients]


LOOPS = {
    "plain": Loop(),
    "zeroed between forward and backward": Loop(zeroed="between"),
    "gradients accumulated": Loop(zeroed="never"),
    "gradients kept": Loop(kept=True),
    "three sizes": Loop(sizes=(2, 3, 4)),
    "three dynamic sizes": Loop(sizes=(2, 3, 4), dynamic=True),
    "parameters moved": Loop(change=moved),
    "parameters replaced": Loop(change=assigned),
}


@pytest.mark.parametrize("is_slower", [True, False], ids=["slower", "faster"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_it_is_decided_however_often_it_is_recorded_anew(way, monkeypatch, loop, is_slower):
    """A few replays of each partition decide, each once, and no more are timed."""
    timed, decided = [], []
    decide = worth.Trial._decide

    def deciding(trial, part):
        decided.append(part.name)
        decide(trial, part)

    def timing(call, device):
        timed.append(device)
        return call(), 98.0 if is_slower else 27.0

    monkeypatch.setattr(worth, "_time_plainly", lambda fn, args, written, device: 50.0)
    monkeypatch.setattr(worth, "_timed", timing)
    monkeypatch.setattr(worth.Trial, "_decide", deciding)
    counters = way.compare(loop, capture_policy="measured")
    assert len(decided) == counters["trials"] == 2  # the forward, and the backward
    assert counters["left_plain"] == (2 if is_slower else 0)
    assert worth._REPLAYS * 2 <= len(timed) <= worth._REPLAYS * 4  # of static sizes, others began
    if is_slower:
        assert counters["replays"] <= 24
        assert counters["partitions_eager"] == 2
        assert counters["plain_calls"] > counters["calls"] // 2
    else:
        assert counters["partitions_eager"] == counters["plain_calls"] == 0
        assert counters["replays"] == counters["calls"] - counters["warmups"]


def test_it_says_so(monkeypatch, caplog):
    monkeypatch.setattr(_torch, "memory_bandwidth", lambda device: 1.0)
    caplog.set_level(logging.INFO)

    def fn(x):
        return (x * 2).sin().cos().tanh()

    x = torch.ones(1 << 20)
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="raise"):
        call = torch.compile(fn, backend="cgpass")
        with programs.counted() as counters:
            for _ in range(4):
                call(x)
        assert (counters["recordings"], counters["plain_calls"], counters["skips"]) == (0, 3, 0)
        assert counters["partitions_eager"] == 1
        assert "is not worth capturing and runs without a graph from now on: copying 4 MiB" in (
            caplog.text
        )
        assert "[not_worth_it]" in cgpass.summary()
        with programs.counted() as counters:
            cgpass.reset()
            call(x)
        assert counters["partitions_captured"] == 1  # it is tried again
    torch.compiler.reset()


def test_explain_says_what_kept_a_partition(monkeypatch):
    monkeypatch.setattr(worth, "_time_plainly", lambda fn, args, written, device: 205.0)
    monkeypatch.setattr(worth, "_timed", lambda call, device: (call(), 98.0))

    def fn(x):
        return (x * 2).sin().cos().tanh()

    options = {"driver": "simulated", "compiler": "eager", "capture_policy": "measured"}
    call = torch.compile(fn, backend="cgpass", options=options)
    for _ in range(12):
        call(torch.ones(8))
    ((part,),) = [graph.partitions for graph in cgpass.explain(call, torch.ones(8)).graphs]
    said = "a replay takes 98 us and a plain call 205 us, as measured in its first calls"
    assert part.timed == said
    assert part.counts["trials"] == 1


def test_a_wrapper_says_that_it_times_nothing(caplog):
    def step(x):
        return x * 2

    for policy, said in (("measured", 1), ("auto", 0), ("always", 0)):
        caplog.clear()
        options = {"driver": "simulated", "capture_policy": policy}
        wrapper = cgpass.CUDAGraphWrapper(step, options=options)
        for _ in range(12):
            wrapper(torch.ones(3))
        assert wrapper.stats.trials == 0
        assert caplog.text.count('step: capture_policy="measured" has no effect') == said


def test_policies_that_do_not_exist_are_refused():
    with pytest.raises(cgpass.errors.OptionError, match=r"capture_policy.*did you mean 'always'"):
        cgpass.Options(capture_policy="alway")
