"""`explain` on a GPU: times on the device inside graphs and out, and memory of pools."""

import pytest
import torch
from torch import nn

import cgpass

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_stays")]


class Model(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.reads = reads

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = self.drop(layer(x).relu())
            if self.reads and number == 1:
                x = x * torch.histc(x, 8).max()
        return x.square().mean()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_times_and_memory_of_a_training_step(compiler):
    model, x = Model(reads=False).cuda(), torch.randn(32, 256, device="cuda")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    with cgpass.set_defaults(compiler=compiler):
        report = cgpass.explain(model, x, compare=True)
    done, work = report.work
    assert done == work > 10
    assert 0 < report.graphs_ms <= report.device_ms
    assert report.ms > 0
    assert report.plain_ms > 0
    assert report.pool_bytes > 0
    for graph in report.graphs:
        (part,) = graph.partitions
        assert graph.driver == "cuda"
        assert part.device_ms > 0
        (recording,) = part.recordings
        assert recording.record_ms > 0
    assert torch.cuda.get_device_name() in str(report)
    assert "of the device time was inside graphs" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_time_in_eager_partitions_is_outside_of_graphs():
    model = Model(reads=True).cuda()
    with cgpass.set_defaults(compiler="eager", on_skip="silent"):
        report = cgpass.explain(model, torch.randn(32, 256, device="cuda"), training=False)
    (graph,) = report.graphs
    first, eager, second = (part.device_ms for part in graph.partitions)
    assert min(first, eager, second) > 0
    inside = (first + second) / (first + eager + second)
    assert 0 < report.graphs_ms / report.device_ms <= inside + 0.01


def test_a_block_times_the_calls_inside():
    call = torch.compile(Model(reads=False).cuda(), backend="cgpass")
    x = torch.randn(32, 256, device="cuda")
    with cgpass.explain() as first:
        for _ in range(4):
            call(x).backward()
    with cgpass.explain() as second:
        for _ in range(4):
            call(x).backward()
    assert first.graphs_ms is None or 0 < first.graphs_ms <= first.device_ms  # of what settled
    assert 0 < second.graphs_ms <= second.device_ms
    assert second.counters["replays"] == 8
