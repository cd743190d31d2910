"""Recordings end before process groups do, whoever made them and however the groups end."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cgpass
from cgpass import _torch

if _torch.wait_tensor() is None:
    pytest.skip("no torch.distributed", allow_module_level=True)

from torch.distributed._functional_collectives import all_reduce
from torch.distributed.distributed_c10d import _abort_process_group


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def wrapper():
    wrapped = cgpass.CUDAGraphWrapper(lambda x: x.sin() * 2, options={"driver": "simulated"})
    for _ in range(3):
        wrapped(torch.ones(4))
    return wrapped


def graphed():
    sample = (torch.ones(2, 4, requires_grad=True),)
    options = cgpass.GraphedOptions(driver="simulated")
    return cgpass.make_graphed_callables(nn.Linear(4, 4), sample, options=options)


def compiled():
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    fn = torch.compile(lambda x: x.sin() * 2, backend=cgpass.cgpass, options=options)
    for _ in range(3):
        fn(torch.ones(4))
    return fn


@pytest.mark.parametrize("make", [wrapper, graphed, compiled])
@pytest.mark.parametrize("end", [dist.destroy_process_group, _abort_process_group])
def test_what_was_recorded_while_a_group_is_there_ends_before_it(alone, make, end):
    cgpass.reset()
    made = make()
    assert cgpass.recordings()
    end()
    assert not cgpass.recordings()
    del made


def test_an_abort_waits_for_no_call_that_is_stuck(alone):
    cgpass.reset()
    stuck, go = threading.Event(), threading.Event()

    def fn(x):
        if threading.current_thread() is not threading.main_thread():
            stuck.set()
            go.wait(60)
        return x.sin() * 2

    late = cgpass.CUDAGraphWrapper(fn, options={"driver": "simulated"})
    thread = threading.Thread(target=late, args=(torch.ones(4),))
    thread.start()
    stuck.wait(60)
    made = wrapper()
    assert len(cgpass.recordings()) == 1
    _abort_process_group()
    assert not cgpass.recordings()
    go.set()
    thread.join()
    del made


def test_what_communicates_is_not_verified_and_a_warning_names_it(alone, caplog):
    def fn(x):
        y = all_reduce(x.sin() * 2, "sum", alone)
        return y.cos().tanh()

    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    options["unsafe_ops"] = ("aten::cos",)
    call = torch.compile(fn, backend=cgpass.cgpass, options=options)
    call(torch.ones(4))
    with cgpass.verify() as verification:
        for _ in range(4):
            call(torch.ones(4))
    assert verification.checked == 4, "tanh"
    (told,) = [r.getMessage() for r in caplog.records if "not verified" in r.getMessage()]
    assert told.startswith(
        "cgpass.verify: not verified, since other processes need not take part in another run of what communicates: "
        "inference captured_0 of test_collectives.py:"
    )
    assert told.endswith("in fn")
