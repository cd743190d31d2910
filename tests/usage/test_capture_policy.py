"""Partitions that turn out to be slower captured are left plain, whatever is held or pending then."""

import itertools
import logging

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

    def decided(self):
        self._plain_us = 0.0 if pattern[next(turn) % len(pattern)] else 2.0
        decide(self)

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
    assert (counters["plain_calls"] > 0) is (slower != "none"), counters
    if slower == "none":
        assert counters["replays"] > 20


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


def test_policies_that_do_not_exist_are_refused():
    with pytest.raises(cgpass.errors.OptionError, match=r"capture_policy.*did you mean 'always'"):
        cgpass.Options(capture_policy="alway")
