"""What `explain` measures on a GPU: kernels, its time inside graphs, memory of pools."""

import gc

import pytest
import torch
from torch import nn

import cgpass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_stays():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
def test_kernels_times_and_memory_of_a_training_step(compiler):
    model, x = Model(reads=False).cuda(), torch.randn(32, 256, device="cuda")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    with cgpass.set_defaults(compiler=compiler):
        report = cgpass.explain(model, x)
    assert report.settled
    assert report.counted == "kernels"
    done, work = report.work
    assert done == work > 10
    assert 0.3 < report.gpu_share <= 1
    assert report.ms > 0
    assert report.plain_ms > 0
    (function,) = report.functions
    assert function.driver == "cuda"
    assert function.pool_bytes > 0
    for graph in function.graphs:
        (part,) = graph.partitions
        assert part.kernels == part.kernels_in_graphs > 0
        assert part.ms > 0
        (recording,) = part.recordings
        assert recording.record_ms > recording.instantiate_ms > 0
    assert torch.cuda.get_device_name() in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_kernels_of_eager_partitions_are_outside_of_graphs():
    model = Model(reads=True).cuda()
    with cgpass.set_defaults(compiler="eager", on_skip="silent"):
        report = cgpass.explain(model, torch.randn(32, 256, device="cuda"), training=False)
    (graph,) = report.graphs
    first, eager, second = graph.partitions
    assert eager.kernels > eager.kernels_in_graphs == 0
    assert first.kernels == first.kernels_in_graphs > 0
    assert second.kernels == second.kernels_in_graphs > 0
    done, work = report.work
    assert done == work - eager.kernels


def test_the_memory_comes_back():
    model = Model(reads=False).cuda()
    x = torch.randn(32, 256, device="cuda")
    for _ in range(2):
        cgpass.explain(model, x)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved()
    cgpass.explain(model, x)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= used
