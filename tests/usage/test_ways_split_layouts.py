"""Graphs that are split after they were compiled: what they hand on lies as the others expect."""

import pytest
import torch
from torch import nn

from tests.usage.programs import counted, gradients, one_of_each_on_cpu


@torch.library.custom_op("split_layouts::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    x.detach().sum().item()  # nobody is told
    return x * 2


wait.register_fake(torch.empty_like)


@torch.library.custom_op("split_layouts::wait_too", mutates_args=())
def wait_too(x: torch.Tensor) -> torch.Tensor:
    x.detach().sum().item()
    return x * 2


@torch.library.custom_op("split_layouts::wait_later", mutates_args=())
def wait_later(x: torch.Tensor) -> torch.Tensor:
    return x * 2


for op in (wait_too, wait_later):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: wait(grad))

OPTIONS = {"on_skip": "silent", "min_partition_ops": 1}
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


class Flattened(nn.Module):
    """Views what is saved, in ways that its layout as Inductor chose it does not allow."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.wait = WAITS[where]

    def forward(self, x):
        x = self.second(self.first(x).relu())
        return self.wait(x).flatten(1).tanh() * x.view(2, -1).sin()


class InOneBuffer(nn.Module):
    """A convolution's weight, which Inductor's forward saves in another layout, shares its memory with what it does not."""

    def __init__(self, *, weight_first):
        super().__init__()
        flat = torch.randn(8 * 8 * 9 + 8) * 0.1
        if weight_first:
            self.weight = nn.Parameter(flat[:576].view(8, 8, 3, 3))
        self.scale = nn.Parameter(flat[576:] if weight_first else flat[:8])
        if not weight_first:
            self.weight = nn.Parameter(flat[8:].view(8, 8, 3, 3))

    def forward(self, x):
        scale = self.scale.view(1, 8, 1, 1)
        x = nn.functional.conv2d(wait_later(x * scale), self.weight, padding=1)
        return (x * scale).tanh()


def trained(make, sizes, *, dynamic=None):
    """A program of training steps, and the counters of its last four."""
    last = {}

    def program(session):
        module, call = session.compiled(make, dynamic=dynamic)
        values = []

        def step(size):
            batch = session.randn(*size).requires_grad_()
            out = call(batch)
            out.square().mean().backward()
            values.extend([out.detach(), batch.grad, *gradients(module)])
            module.zero_grad(set_to_none=True)

        for size in sizes[:-4]:
            step(size)
        with counted() as counters:
            for size in sizes[-4:]:
                step(size)
        last.update(counters)
        return values

    return program, last


def check(setting, make, sizes, *, dynamic=None, **options):
    """Splits, gives what eager gives, and settles."""
    program, last = trained(make, sizes, dynamic=dynamic)
    with counted() as counters:
        ours = setting.run(program, compiler="inductor", **OPTIONS, **options)
    if options.get("driver") != "none":
        assert counters["partitions_eager"] > 0
        assert counters["calls"] == sum(counters[n] for n in ("replays", "warmups", "plain_calls"))
        assert last["replays"] == last["calls"] > 0
    for a, b in zip(ours, setting.run_eagerly(program), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_slices_that_are_saved_lie_as_the_backward_expects(setting, where, dynamic):
    one_of_each_on_cpu(setting, another=dynamic and where == "backward")
    sizes = [(2, 4, 5, 6)] * 24
    if dynamic:
        sizes = [(2, 4, 5, 6)] * 16 + [(3, 4, 7, 6)] * 16 + [(2, 4, 5, 6)] * 8
    check(setting, lambda: Sliced(where), sizes, dynamic=dynamic)


def test_a_backward_that_views_what_is_saved_is_split(setting):
    check(setting, lambda: Flattened("backward"), [(2, 4, 5, 6)] * 24)


class Kept(Flattened):
    def forward(self, x):
        return self.second(wait_later(self.first(x).relu())).tanh()


UNSAFE = {"unsafe_ops": ("split_layouts::wait",)}


@pytest.mark.parametrize("driver", ["none", None])
def test_a_backward_in_parts_of_a_forward_that_is_one_graph(setting, driver):
    """What it saves is laid out as Inductor chose, and the parts were traced with something else."""
    options = {} if driver is None else {"driver": driver}
    check(setting, lambda: Kept("backward"), [(2, 4, 6, 8)] * 12, **UNSAFE, **options)


@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("when", ["compiled", "called"])
def test_parameters_that_share_memory(setting, when, weight_first):
    one_of_each_on_cpu(setting, another=when == "compiled" and weight_first)
    options = UNSAFE if when == "compiled" else {}
    check(setting, lambda: InOneBuffer(weight_first=weight_first), [(2, 8, 6, 8)] * 24, **options)
