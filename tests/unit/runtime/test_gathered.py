"""Storages that FSDP2 gathers into: known before use, and allocated from their own pool."""

import contextlib
import sys
import weakref

import pytest
import torch
from torch.distributed import fsdp

import cgpass
from cgpass.runtime import gathered

PARAM = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
GROUP = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
assert fsdp.fully_shard
ALLOCATING = gathered._allocating


def noting(events):
    @contextlib.contextmanager
    def block(device):
        events.append(("begin", device.type))
        try:
            yield
        finally:
            events.append(("end", device.type))

    return block


class Param(PARAM.FSDPParam):
    """One whose parameter is not sharded at all."""

    def __init__(self):
        self.all_gather_outputs = []


@pytest.fixture(autouse=True)
def gathers(monkeypatch):
    """FSDP2 as it comes, patched by cgpass; what was begun and ended."""
    for module in (PARAM, GROUP):
        alloc = module.alloc_storage
        monkeypatch.setattr(module, "alloc_storage", getattr(alloc, "__wrapped__", alloc))
    init = PARAM.FSDPParam.init_all_gather_outputs
    init = getattr(init, "__wrapped__", init)
    monkeypatch.setattr(PARAM.FSDPParam, "init_all_gather_outputs", init)
    monkeypatch.setattr(gathered, "_gathered", weakref.WeakKeyDictionary())
    events = []

    monkeypatch.setattr(gathered, "_allocating", noting(events))
    gathered.give_gathered_a_pool()
    return events


def made():
    param = Param()
    param.init_all_gather_outputs([4], [torch.float32], 2, torch.device("cpu"))
    (tensor,) = param.all_gather_outputs
    return param, tensor


def test_memory_is_made_between_begin_and_end(gathers):
    param, tensor = made()
    assert gathers == [("begin", "cpu"), ("end", "cpu")]
    assert tensor.shape == (8,)
    param.init_all_gather_outputs([4], [torch.float32], 2, torch.device("cpu"))  # is there already
    assert len(gathers) == 2
    assert param.all_gather_outputs[0] is tensor
    PARAM.free_storage(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    GROUP.alloc_storage(tensor)
    assert tensor.untyped_storage().nbytes() == 32
    assert gathers[2:] == [("begin", "cpu"), ("end", "cpu")]


def test_where_the_pool_can_not_grow_memory_is_made_outside_of_it(gathers, monkeypatch):
    """The allocator doesn't look for what others have cached as long as it is told of a pool."""
    _, tensor = made()
    PARAM.free_storage(tensor)
    alloc, tries = PARAM.alloc_storage.__wrapped__, []

    def full(tensor):
        tries.append(len(gathers))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("the pool is full")
        alloc(tensor)

    monkeypatch.setattr(PARAM, "alloc_storage", full)
    monkeypatch.setattr(GROUP, "alloc_storage", full)
    gathered.give_gathered_a_pool()
    PARAM.alloc_storage(tensor)
    assert tensor.untyped_storage().nbytes() == 32
    assert tries == [3, 4]  # behind a "begin", then behind its "end"


@pytest.fixture
def told(monkeypatch):
    """Calls to the allocator of a GPU that isn't there."""
    events = []
    monkeypatch.setattr(
        torch.cuda,
        "use_mem_pool",
        lambda pool, device: noting(events)(torch.device("cuda", device)),
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gathered, "_has_pools", lambda: True)
    monkeypatch.setattr(gathered, "_pool", lambda device: None)
    return events


CUDA = torch.device("cuda", 1)
TOLD = [("begin", "cuda"), ("end", "cuda")]


def test_a_device_is_told_of_the_pool_once_at_a_time(told):
    with ALLOCATING(CUDA), ALLOCATING(CUDA):  # another thread, or a function that is patched twice
        assert told == TOLD[:1]
    assert told == TOLD
    with ALLOCATING(CUDA):
        pass
    assert told == TOLD * 2


@pytest.mark.parametrize("why", ["on CPU", "captured", "another allocator"])
def test_there_is_no_pool_on_cpu_in_captures_or_for_other_allocators(told, monkeypatch, why):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    monkeypatch.setattr(gathered, "_has_pools", lambda: why != "another allocator")
    with ALLOCATING(torch.device("cpu") if why == "on CPU" else CUDA):
        assert told == []


def fails_with(error):
    def fail(device):
        raise error

    return fail


def test_where_torch_refuses_a_pool_there_is_none_and_a_warning_says_so_once(
    told, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr(gathered, "_pool", fails_with(RuntimeError("no pool\nmore")))
        for _ in range(2):
            with ALLOCATING(CUDA):
                assert told == []
    (record,) = caplog.records
    assert "have no memory pool of their own (no pool): layers may" in record.message
    with monkeypatch.context() as patch:
        patch.setattr(gathered, "_pool", fails_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt), ALLOCATING(CUDA):
            pass
    with ALLOCATING(CUDA):
        assert told == TOLD[:1]


def test_the_pool_is_given_back_once_nothing_lies_in_it(monkeypatch):
    cleared = []
    monkeypatch.setattr(gathered._pool, "cache_clear", lambda: cleared.append(1), raising=False)
    _, tensor = made()
    gathered.give_pool_back()
    assert cleared == []
    PARAM.free_storage(tensor)
    gathered.give_pool_back()
    assert cleared == [1]
    cgpass.reset()
    assert cleared == [1, 1]
