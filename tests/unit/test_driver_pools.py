"""Which pools the CUDA driver records into, and what it asks the allocator of them."""

import ctypes
import sys

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime.driver import CUDADriver
from tests.unit.fake_cuda import DEVICE


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
    assert of_pools(log) == 2 * ["begin (0, 1)", "end (0, 1)"]
    first, _ = driver.record(lambda args: [], [], opaque=False)
    released = 2 * ["release (0, 1)"]
    assert of_pools(log) == [*released, "empty cache", "begin (0, 2) thread_local"]
    second, _ = driver.record(lambda args: [], [], opaque=False)
    assert of_pools(log) == ["empty cache", "begin (0, 2) thread_local"]
    third, _ = driver.record(lambda args: [], [], opaque=False)
    assert of_pools(log) == ["begin (0, 2) thread_local"]
    assert first is not second is not third


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


def test_a_pool_that_is_given_serves_warm_ups_and_captures(pools):
    _, log = pools
    driver = CUDADriver(DEVICE, pool=(7, 7))
    driver.warm_up(lambda args: [], [])
    graph, _ = driver.record(lambda args: [], [], opaque=False)
    found = ["begin (7, 7)", "end (7, 7)", "begin (7, 7) thread_local", "release (7, 7)"]
    assert of_pools(log) == found
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
