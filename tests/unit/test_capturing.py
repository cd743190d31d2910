"""Nothing is destroyed while a capture runs."""

import threading

import pytest
import torch

from cgpass import _torch
from cgpass.runtime.capturing import capture_runs, is_any_capture_running, when_no_capture_runs


def test_it_happens_at_once_if_nothing_runs():
    done = []
    when_no_capture_runs(lambda: done.append(1))
    assert done == [1]
    assert not is_any_capture_running()


def test_it_waits_for_the_last_capture():
    done = []
    with capture_runs():
        with capture_runs():
            when_no_capture_runs(lambda: done.append(1))
        assert is_any_capture_running()
        when_no_capture_runs(lambda: done.append(2))
        assert done == []
    assert done == [1, 2]


def test_another_threads_capture_counts():
    done, started, end = [], threading.Event(), threading.Event()

    def captures():
        with capture_runs():
            started.set()
            end.wait(10)

    thread = threading.Thread(target=captures)
    thread.start()
    started.wait(10)
    when_no_capture_runs(lambda: done.append(1))
    assert done == []
    end.set()
    thread.join()
    assert done == [1]


def test_what_is_destroyed_may_destroy_more():
    done = []
    with capture_runs():
        when_no_capture_runs(lambda: when_no_capture_runs(lambda: done.append(1)))
    assert done == [1]


def test_a_capture_that_raises_ends():
    done = []

    def interrupted():
        with capture_runs():
            when_no_capture_runs(lambda: done.append(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1]
    assert not is_any_capture_running()


def test_stale_streams_follow_captures_as_long_as_one_runs(monkeypatch):
    setting = [False]

    def follow(value):
        before, setting[0] = setting[0], value
        return before

    monkeypatch.setattr(_torch, "have_stale_streams_follow", follow)
    with capture_runs():
        with capture_runs():
            assert setting == [True]
        assert setting == [True]
    assert setting == [False]
    setting[0] = True  # the user's own
    with pytest.raises(ValueError, match="in it"), capture_runs():
        raise ValueError("in it")
    assert setting == [True]


def test_torchs_own_setting_is_set_where_there_is_one():
    before = _torch.have_stale_streams_follow(True)
    now = _torch.have_stale_streams_follow(before)
    has_one = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")
    assert (before, now) == (False, has_one)
