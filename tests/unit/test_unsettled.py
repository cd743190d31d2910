"""Calls that do nothing but warm up: what is remembered of them, and what is said."""

import logging

import pytest
import torch
from expecttest import assert_expected_inline

import cgpass
from tests.unit.runners import COPIED, STATIC, SYMINT, call, counts, runner

X = torch.ones(2)


def messages(caplog, level=logging.WARNING):
    found = [r.getMessage() for r in caplog.records if r.levelno == level]
    return [message for message in found if "never recorded" in message]


def test_an_integer_that_never_repeats_is_said_once(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    for n in range(63):
        call(run, X, n)
    call(run, X, 63)
    assert messages(caplog) == []
    for n in range(64, 200):
        assert call(run, X, n) == [[n + 1.0] * 2]
    (message,) = messages(caplog)
    assert_expected_inline(
        message,
        """\
forward captured_0: 64 calls in a row were never recorded, since each came with another value or layout of x1 (read at model.py:1 in forward: code). Pass a number that changes as a 0-dim tensor on the device, keep to a few sizes, and write new values into parameters and buffers (copy_) instead of replacing them.""",
    )
    assert counts(run) == (200, 0, 0, 0)


def test_parameters_that_are_always_new_are_said_once(caplog):
    run = runner(lambda x, w: [x + w], COPIED, STATIC)
    weights = [torch.full((2,), float(i)) for i in range(300)]
    for weight in weights:
        call(run, X, weight)
    (message,) = messages(caplog)
    assert message.startswith(
        "forward captured_0: 256 calls in a row were never recorded, since each came with other tensors for x1 (read at"
    )


def test_layers_that_share_code_are_not_said_anything_of(caplog):
    run = runner(lambda x, n, w: [x + w + n], COPIED, SYMINT, STATIC)
    weights = [torch.full((2,), float(i)) for i in range(100)]
    for n in range(5):
        for weight in weights:
            call(run, X, n, weight)
    for _ in range(3):
        for n in range(50):  # sizes that come back
            call(run, X, n, weights[0])
    assert messages(caplog) == []


def test_replays_in_between_start_the_count_anew(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    for n in range(1000, 1300):
        call(run, X, n)
        for _ in range(2):
            call(run, X, 1)
    assert messages(caplog) == []
    assert run.stats.replays > 0


def test_silent_skips_are_said_for_information_only(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT, settings={"on_skip": "silent"})
    with caplog.at_level(logging.INFO, "cgpass"):
        for n in range(100):
            call(run, X, n)
    assert messages(caplog) == []
    assert len(messages(caplog, logging.INFO)) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_remembered_of_integers_is_bounded(recorded):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    if recorded:
        for _ in range(3):
            call(run, X, -1)
    for n in range(2000):
        call(run, X, n)
    assert len(run.table._shapes) <= 1024
    if recorded:
        assert call(run, X, -1) == [[0, 0]]
        assert counts(run) == (2001, 1, 3, 0), "what is recorded stays"
    for _ in range(2):
        call(run, X, 1999)
    assert run.stats.recordings == 1 + recorded, "what came last is remembered"


def test_a_wrapper_names_the_input(caplog):
    wrapped = cgpass.CUDAGraphWrapper(
        lambda x: x * 2, options={"driver": "simulated"}, name="doubled"
    )
    for size in range(1, 100):
        wrapped(torch.ones(size))
    (message,) = messages(caplog)
    assert message.startswith("doubled: 64 calls in a row were never recorded")
    assert "another value or layout of input 0." in message
