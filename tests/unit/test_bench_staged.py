"""Stages of a call: of graphs that are replayed once each."""

import pytest
import torch
from benchlib import staged
from torch import nn

import cgpass

OPTIONS = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}


def step_of(module, shapes):
    call, batches = torch.compile(module, backend=cgpass.cgpass, options=OPTIONS), iter(shapes)

    def step():
        module.zero_grad()
        call(torch.randn(next(batches), 4)).square().mean().backward()

    return step


def endless(*sizes):
    while True:
        yield from sizes


def test_stages_of_a_training_step():
    step = step_of(nn.Sequential(nn.Linear(4, 4), nn.GELU()), endless(2))
    for _ in range(4):
        step()
    found = staged.stages(step, "training", torch.device("cpu"))
    for graph in ("forward", "backward"):
        assert list(found[graph]) == ["before", "launch", "after the launch", "rest"]
        assert found[graph]["launch"] > 0
    parts = sum(sum(found[graph].values()) for graph in ("forward", "backward"))
    assert 0.3 * found["until_done"] < parts < 3 * found["until_done"]
    assert found["forward"]["rest"] == 0.0, "what lies between the graphs is before the second"
    assert found["guards"] >= 0


def test_calls_that_are_no_replays_have_no_stages():
    step = step_of(nn.Linear(4, 4), iter(range(2, 10**6)))
    with pytest.raises(RuntimeError, match="of 100 steps were a replay each way"):
        staged.stages(step, "training", torch.device("cpu"))
