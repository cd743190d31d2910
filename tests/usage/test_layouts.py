"""Values between and out of graphs lie as others expect, also if a compiled graph is split."""

import pytest
import torch
from torch import nn

from tests.operators import doubling
from tests.usage.programs import counted, learn, noting, one_of_each_on_cpu

wait, wait_too = (doubling(name, reads=True) for name in ("wait", "wait_too"))
wait_later = doubling("wait_later")
for op in (wait_too, wait_later):
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


def check(setting, make, sizes, *, dynamic=None, **options):
    """Splits, gives what eager gives, and settles."""
    steps = []

    def program(session):
        module, call = session.compiled(make, dynamic=dynamic)
        for size in sizes:
            batch = session.randn(*size).requires_grad_()
            out = call(batch)
            yield [out, *learn(module, out.square().mean()), batch.grad]

    with counted() as counters:
        noted = noting(program, setting.driver, steps)
        ours = setting.run(noted, compiler="inductor", **OPTIONS, **options)
    if options.get("driver") != "none":
        assert counters["partitions_eager"] > 0
        assert counters["calls"] == sum(counters[n] for n in ("replays", "warmups", "plain_calls"))
        assert all(step["replays"] == step["calls"] > 0 for step in steps[-4:])
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


class Kept(nn.Module):
    """Saves what its convolutions make, in the layout that Inductor chose."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.second(wait_later(self.first(x).relu())).tanh()


UNSAFE = {"unsafe_ops": ("tests::wait",)}


@pytest.mark.parametrize("driver", ["none", None])
def test_a_backward_in_parts_of_a_forward_that_is_one_graph(setting, driver):
    """Saved values have Inductor's layouts, and the parts were traced with others."""
    options = {} if driver is None else {"driver": driver}
    check(setting, Kept, [(2, 4, 6, 8)] * 12, **UNSAFE, **options)


# ---- gradients of convolutions lie as their weights do, whatever layout Inductor computes in


class Convolutions(nn.Module):
    """Of so many channels that Inductor computes it channels-last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(72, 80, 3, padding=1)
        self.point = nn.Conv2d(80, 80, 1)
        self.second = nn.Conv2d(80, 72, 3, padding=1)

    def forward(self, x):
        return self.second(self.point(self.first(x).relu()).relu())


def strides(tensor):
    """Of the dimensions in which there is more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_lie_as_weights(setting, monkeypatch, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = {}

    def program(session):
        module, call = session.compiled(lambda: Convolutions().to(memory_format=layout))
        x = session.randn(2, 72, 8, 8).to(memory_format=layout)
        parameters = list(module.parameters())
        for _ in range(4):
            found["ours"] = torch.autograd.grad(call(x).square().sum(), parameters)
        default = torch.compile(module)(x)
        found["default"] = torch.autograd.grad(default.square().sum(), parameters)
        found["weights"] = parameters
        return [grad.clone() for grad in found["ours"]]

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    setting.run(program, compiler="inductor")
    for ours, default, weight in zip(*found.values(), strict=True):
        assert strides(ours) == strides(weight)
        assert torch.equal(ours, default)
    differ = any(
        strides(g) != strides(w) for g, w in zip(found["default"], found["weights"], strict=True)
    )
    assert differ is not channels_last, "what is tested here is there no more"
