"""Autocast's cache is off for who is inside, and whatever the order in which threads leave."""

import threading

import pytest
import torch

from cgpass.torch_private import autocast_cache_off


def enabled_by_autocast():
    with torch.autocast("cpu"):
        return torch.is_autocast_cache_enabled()


def test_only_who_is_inside_notices():
    before, told = torch.set_autocast_cache_enabled, []
    with autocast_cache_off():
        with autocast_cache_off():
            assert not enabled_by_autocast()
        assert not enabled_by_autocast()
        thread = threading.Thread(target=lambda: told.append(enabled_by_autocast()))
        thread.start()
        thread.join()
    assert told == [True]
    assert torch.set_autocast_cache_enabled is before
    assert enabled_by_autocast()


def test_threads_leave_in_any_order():
    before, steps = torch.set_autocast_cache_enabled, [threading.Event() for _ in range(2)]

    def other():
        with autocast_cache_off():
            steps[0].set()
            steps[1].wait(60)

    thread = threading.Thread(target=other)
    with autocast_cache_off():
        thread.start()
        assert steps[0].wait(60)
    assert enabled_by_autocast()
    assert torch.set_autocast_cache_enabled is not before
    steps[1].set()
    thread.join()
    assert torch.set_autocast_cache_enabled is before


def test_an_error_restores_it():
    before = torch.set_autocast_cache_enabled
    with pytest.raises(ZeroDivisionError), autocast_cache_off():
        raise ZeroDivisionError
    assert torch.set_autocast_cache_enabled is before
