"""What FSDP2 gathers: known before its memory is used, and allocated from a pool of its own."""

import sys

import pytest
import torch
from torch.distributed import fsdp

import cgpass
from cgpass import torch_private
from cgpass.runtime import gathered
from cgpass.runtime.owner import StorageSet

PARAM = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
GROUP = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
assert fsdp.fully_shard
BEGIN = gathered._begin


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
    monkeypatch.setattr(gathered, "_gathered", StorageSet())
    events = []

    def begin(device):
        events.append(("begin", device.type))
        return lambda: events.append(("end", device.type))

    monkeypatch.setattr(gathered, "_begin", begin)
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


def test_it_ends_after_an_error_too(gathers):
    with pytest.raises(RuntimeError):
        PARAM.alloc_storage(
            torch.from_numpy(torch.zeros(3).numpy()).expand(5, 3)
        )  # can't be enlarged
    assert gathers == [("begin", "cpu"), ("end", "cpu")]


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


def test_what_died_is_forgotten():
    param, tensor = made()
    assert list(gathered._gathered) == [tensor.untyped_storage()]
    param.all_gather_outputs.clear()
    del tensor
    assert not list(gathered._gathered)


def test_nothing_is_patched_without_fsdp(monkeypatch):
    monkeypatch.delitem(sys.modules, PARAM.__name__)
    torch_private.around_gathering(lambda device: None, lambda storage: None)
    assert not list(gathered._gathered)


class Pool:
    id = (0, 7)


@pytest.fixture
def told(monkeypatch):
    """What the allocator of a GPU that isn't there is told."""
    calls = []
    for name in ("begin_allocating_to_pool", "end_allocating_to_pool", "release_pool"):
        monkeypatch.setattr(
            torch_private, name, lambda device, handle, name=name: calls.append((name, device))
        )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gathered, "_has_pools", lambda: True)
    monkeypatch.setattr(gathered, "_pool", lambda device: Pool)
    return calls


CUDA = torch.device("cuda", 1)


def test_a_device_is_told_of_the_pool_once_at_a_time(told):
    end = BEGIN(CUDA)
    assert BEGIN(CUDA) is None  # another thread, or a function that is patched twice
    end()
    assert told == [
        ("begin_allocating_to_pool", 1),
        ("end_allocating_to_pool", 1),
        ("release_pool", 1),
    ]
    BEGIN(CUDA)()
    assert len(told) == 6


def test_there_is_no_pool_on_cpu_in_captures_or_for_other_allocators(told, monkeypatch):
    assert BEGIN(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert BEGIN(CUDA) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gathered, "_has_pools", lambda: False)
    assert BEGIN(CUDA) is None
    assert told == []


def test_where_torch_refuses_a_pool_there_is_none_and_a_warning_says_so_once(
    told, monkeypatch, caplog
):
    def refuses(device):
        raise RuntimeError("no pool\nmore")

    monkeypatch.setattr(gathered, "_pool", refuses)
    with caplog.at_level("WARNING", "cgpass"):
        assert [BEGIN(CUDA), BEGIN(CUDA)] == [None, None]
    (record,) = caplog.records
    assert "since torch gives it no memory pool of its own (no pool): layers may" in record.message


def test_what_interrupts_it_leaves_nothing_locked(told, monkeypatch):
    def stops(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(gathered, "_pool", stops)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            BEGIN(CUDA)


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
