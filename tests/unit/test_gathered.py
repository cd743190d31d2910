"""What FSDP2 gathers: known before its memory is used, and allocated from a pool of its own."""

import sys

import pytest
import torch
from torch.distributed import fsdp

from cgpass import _torch
from cgpass.runtime import gathered

PARAM = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
GROUP = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
assert fsdp.fully_shard


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
    monkeypatch.setattr(gathered, "_gathered", {})
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


def test_it_is_patched_wherever_it_was_imported_and_once():
    first = PARAM.alloc_storage
    assert GROUP.alloc_storage is first
    assert not hasattr(first.__wrapped__, "__wrapped__")
    gathered.give_gathered_a_pool()
    assert PARAM.alloc_storage is first


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


def test_what_is_gathered_is_known_before_it_is_emptied():
    _, tensor = made()
    known, other = gathered.Gathered([0, 1]), torch.zeros(8)
    known.note([tensor, other])
    assert known.any
    assert known.module([tensor, other]) == {tensor.untyped_storage()._cdata}
    view = tensor.view(2, 4)
    assert known.module([view, other]) == known.module([tensor, other])
    _, second = made()
    assert known.module([second, other]) != known.module([tensor, other])


def test_what_died_is_forgotten():
    param, tensor = made()
    assert len(gathered._gathered) == 1
    param.all_gather_outputs.clear()
    del tensor
    made()
    assert len(gathered._gathered) == 1


def test_what_is_traced_is_left_alone(gathers, monkeypatch):
    _, tensor = made()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    PARAM.free_storage(tensor)
    PARAM.alloc_storage(tensor)
    assert tensor.untyped_storage().nbytes() == 32
    made()
    assert len(gathers) == 2


def test_nothing_is_patched_without_fsdp(monkeypatch):
    monkeypatch.delitem(sys.modules, PARAM.__name__)
    _torch.around_gathering(lambda device: None, lambda storage: None)
    assert gathered._gathered == {}


def test_the_pool_is_given_back_once_nothing_lies_in_it(monkeypatch):
    cleared = []
    monkeypatch.setattr(gathered._pool, "cache_clear", lambda: cleared.append(1), raising=False)
    _, tensor = made()
    gathered.give_pool_back()
    assert cleared == []
    PARAM.free_storage(tensor)
    gathered.give_pool_back()
    assert cleared == [1]
