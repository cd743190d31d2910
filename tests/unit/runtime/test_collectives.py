"""Recordings end before process groups do, whoever made them and however the groups end."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cgpass
from cgpass.runtime import owner
from cgpass.runtime.collectives import UnderWay

if not torch.distributed.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

from torch.distributed._functional_collectives import all_reduce
from torch.distributed.distributed_c10d import _abort_process_group

aten = torch.ops.aten


def recordings():
    return [r for each in list(owner._owners) for pool in each._pools for r in pool.recordings]


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
def test_what_was_recorded_while_a_group_is_there_ends_before_it(process_group, make, end):
    cgpass.reset()
    made = make()
    assert recordings()
    end()
    assert not recordings()
    del made


def test_an_abort_waits_for_no_call_that_is_stuck(process_group):
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
    assert len(recordings()) == 1
    _abort_process_group()
    assert not recordings()
    other = threading.Thread(target=made, args=(torch.ones(4),), daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive(), "what is idle is nobody's afterwards"
    go.set()
    thread.join()
    del made


def test_what_communicates_is_not_verified_and_a_warning_names_it(process_group, caplog):
    def fn(x):
        y = all_reduce(x.sin() * 2, "sum", process_group)
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
    assert told.startswith("cgpass.verify: inference captured_0 of test_collectives.py:")
    assert told.endswith("in fn: it communicates, so it can't run once more alone: not verified")


class Work:
    """Of a collective in place."""

    def __init__(self):
        self.waited = False

    def wait(self):
        self.waited = True


CALLS = {
    "memory is made": (aten.empty.memory_format, lambda sent, got: ([4],), False),
    "a view": (aten.slice.Tensor, lambda sent, got: (sent, 0, 0, 2), False),
    "read": (aten.sin.default, lambda sent, got: (sent,), True),
    "something else is written": (aten.mul_.Tensor, lambda sent, got: (got, 2), False),
    "received elsewhere": (torch.ops.c10d.recv_.default, lambda sent, got: ([got],), False),
    "received there": (torch.ops.c10d.recv_.default, lambda sent, got: ([sent],), True),
    "unknown code": (lambda x: x, lambda sent, got: (got,), True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_send_is_waited_for_before_its_memory_is_used(name):
    func, args_of, waits = CALLS[name]
    whole, work, under_way = torch.ones(8), Work(), UnderWay()
    sent, got = whole[:4], whole[4:]
    under_way.note(torch.ops.c10d.send.default, ([sent],), work)
    under_way.wait_before(func, args_of(sent, got), {}, torch.ones(4))
    assert work.waited is waits
    under_way.wait()
    assert work.waited
