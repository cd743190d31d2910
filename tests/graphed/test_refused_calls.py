"""What is left of a call of `make_graphed_callables` that was refused."""

import gc

import pytest
import torch

from cgpass.errors import CGPassError
from cgpass.graphed.callables import GraphedFunction
from cgpass.graphed.group import Group
from cgpass.runtime.driver import CUDADriver
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.simulated import SimulatedDriver, SimulatedGraph, _Tape
from tests.graphed.steps import net

KINDS = (
    *(Owner, Group, GraphedFunction, Recording),
    *(CUDADriver, SimulatedDriver, SimulatedGraph, _Tape),
)


class Counts(torch.nn.Module):
    """Raises in one of its runs."""

    def __init__(self, number):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.left = number

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise ValueError("not this time")
        return self.linear(x)


class Unused(Counts):
    def __init__(self):
        super().__init__(0)
        self.other = torch.nn.Linear(8, 8)


class Reads(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()


def elsewhere(setting):
    return torch.empty(2, device="meta")


CASES = {
    "argument": lambda s: ((net(), (s.randn(2, 8), elsewhere(s))), {}),
    "second binding": lambda s: (
        ((net(), net()), ((s.randn(2, 8),), (s.randn(2, 8), elsewhere(s)))),
        {},
    ),
    "unused": lambda s: ((Unused(), (s.randn(2, 8),)), {}),
    "hook": lambda s: (
        (net(), (s.randn(2, 8),)),
        {"capture_time_hooks": [{"forward": lambda *args: 1}]},
    ),
    "warm-up": lambda s: (((net(), Counts(2)), ((s.randn(2, 8),),) * 2), {}),
    "capture": lambda s: (((net(), Counts(4)), ((s.randn(2, 8),),) * 2), {}),
    "host read": lambda s: (((net(), Reads()), ((s.randn(2, 8),),) * 2), {}),
}


def alive():
    return [each for each in gc.get_objects() if isinstance(each, KINDS)]


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_garbage_collector(setting, case):
    (fns, args), options = CASES[case](setting)
    for each in fns if isinstance(fns, tuple) else (fns,):
        setting.module(each)
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in alive()}
        with pytest.raises((ValueError, CGPassError)):
            setting.graphed(fns, args, **options)
        left = [type(each) for each in alive() if id(each) not in before]
    finally:
        gc.enable()
    assert left == []
