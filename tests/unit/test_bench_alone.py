"""What a benchmark's pieces take by themselves: eager partitions and graphs are told apart, and run again."""

import time
from types import SimpleNamespace

import pytest
import torch
from benchlib import alone
from torch import nn

import cgpass

seconds = 0.01
calls = []


@torch.library.custom_op("alone::host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.sum().item())
    time.sleep(seconds)
    return x * 2


@host.register_fake
def _(x):
    return torch.empty_like(x)


host.register_autograd(lambda ctx, grad: host(grad))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(host(self.first(x).relu())).square().mean()


class Arm:
    """As much of a benchmark's arm as is asked for."""

    def __init__(self):
        torch.manual_seed(0)
        self.module = Model()
        options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
        self.call = torch.compile(self.module, backend=cgpass.cgpass, options=options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        batches = [{"x": torch.randn(2, 4)}]
        self.workload = SimpleNamespace(device=torch.device("cpu"), batches=batches)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.call(**batch).backward()
        self.finish()

    def finish(self):
        self.optimizer.step()


@pytest.fixture
def arm():
    arm = Arm()
    for _ in range(4):
        arm.step(arm.workload.batches[0])
    return arm


def test_eager_partitions_and_replays_of_a_step_are_told_apart(arm):
    assert (len(alone.eager_partitions(arm)), len(alone.replays(arm))) == (2, 4)


def test_eager_partitions_run_alone_with_what_the_step_gave_them(arm):
    eager = alone.eager_partitions(arm)
    given = calls[-2:]
    for run, inputs in eager:
        run(list(inputs))
    assert calls[-2:] == given


def test_each_piece_is_timed_by_itself(arm):
    before = len(calls)
    found = alone.times(arm, repeats=3)
    assert len(calls) - before == 2 * (3 + 2)
    assert found["eager_ms"] >= 2 * seconds * 1e3
    assert set(found) == {"eager_ms", "optimizer_ms", "graphs_ms"}
    assert all(value > 0 for value in found.values())
    assert all(parameter.grad is None for parameter in arm.module.parameters())


def test_a_step_goes_on_as_before_afterwards(arm):
    alone.times(arm, repeats=1)
    found = cgpass.counters()["replays"]
    arm.step(arm.workload.batches[0])
    assert cgpass.counters()["replays"] - found == 4


def test_steps_are_made_until_all_is_replayed():
    assert len(alone.replays(Arm())) == 4


def test_what_is_never_replayed_is_refused():
    torch.compiler.reset()  # what was recorded for another module serves this one, too: its parameters are copied
    with pytest.raises(RuntimeError, match="not all of a step was replayed in 1 steps"):
        alone.replays(Arm(), attempts=1)
