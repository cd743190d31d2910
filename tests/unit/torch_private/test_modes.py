"""Autocast's cache is off for who is inside, and for no other thread."""

import torch

from cgpass.torch_private import autocast_cache_off
from tests.usage.programs import in_threads


def enabled_by_autocast():
    with torch.autocast("cpu", cache_enabled=True):
        return torch.is_autocast_cache_enabled()


def test_only_who_is_inside_notices():
    told = []
    with autocast_cache_off():
        with autocast_cache_off():
            assert not enabled_by_autocast()
        assert not enabled_by_autocast()
        in_threads(lambda: told.append(enabled_by_autocast()))
    assert told == [True]
    assert torch.is_autocast_cache_enabled()
    assert enabled_by_autocast()
