"""Graphs that are split after they were compiled: what they hand on lies as the others expect."""

import pytest
import torch
from torch import nn

from tests.usage.programs import counted, gradients


@torch.library.custom_op("split_layouts::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    x.detach().sum().item()  # nobody is told
    return x * 2


wait.register_fake(torch.empty_like)


@torch.library.custom_op("split_layouts::wait_too", mutates_args=())
def wait_too(x: torch.Tensor) -> torch.Tensor:
    x.detach().sum().item()
    return x * 2


wait_too.register_fake(torch.empty_like)
wait_too.register_autograd(lambda ctx, grad: wait(grad))


@torch.library.custom_op("split_layouts::wait_later", mutates_args=())
def wait_later(x: torch.Tensor) -> torch.Tensor:
    return x * 2


wait_later.register_fake(torch.empty_like)
wait_later.register_autograd(lambda ctx, grad: wait(grad))

WAITS = {"both": wait_too, "backward": wait_later}


class Sliced(nn.Module):
    """Saves a slice with gaps, which Inductor's forward saves without them, and copies of weights."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.wait = WAITS[where]

    def forward(self, x):
        part = self.first(x)[:, :, ::2, 1:]
        return self.second(self.wait(part) * part * part.cos()).tanh()


def trained(module, call, batches):
    values = []
    for batch in batches:
        batch.requires_grad_()
        out = call(batch)
        out.square().mean().backward()
        values += [out.detach(), batch.grad, *gradients(module)]
        module.zero_grad(set_to_none=True)
    return values


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_slices_that_are_saved_lie_as_the_backward_expects(setting, where, dynamic):
    if dynamic and where == "backward" and setting.device.type == "cpu":
        pytest.skip("each value is in another pair, and CPUs take long to compile")

    def program(session):
        module, call = session.compiled(lambda: Sliced(where), dynamic=dynamic)
        batches = session.batches(2, 4, 5, 6, count=24)
        if dynamic:
            batches += [
                *session.batches(3, 4, 7, 6, count=3),
                *session.batches(2, 4, 5, 6, count=3),
            ]
        return trained(module, call, batches)

    with counted() as counters:
        ours = setting.run(program, compiler="inductor", on_skip="silent", min_partition_ops=1)
    eager = setting.run_eagerly(program)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert counters["partitions_eager"] > 0
    assert counters["plain_calls"] == 0
    assert counters["replays"] > counters["warmups"], "settles"
