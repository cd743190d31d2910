"""Parameters and buffers that callables write while they run."""

import pytest
import torch

import cgpass
from tests.graphed.steps import same, step, twins
from tests.usage.programs import state


class Writes(torch.nn.Module):
    """Writes one of its tensors in each forward, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))
        self.way = way

    def forward(self, x):
        with torch.no_grad():
            if self.way == "frozen":
                self.frozen.add_(1)
            elif self.way == "data":
                self.frozen.data.add_(1)
            elif self.way == "clipped":
                self.inner.weight.clamp_(-0.1, 0.1)
            elif self.way == "clipped data":
                self.inner.weight.data.clamp_(-0.1, 0.1)
            else:
                self.count.add_(1)
        return self.inner(x) + self.frozen + self.count


@pytest.mark.parametrize("way", ["frozen", "data", "clipped", "clipped data", "buffer"])
def test_what_a_forward_writes_is_put_back_and_then_written_by_calls(setting, way):
    module, plain = twins(setting, Writes(way))
    before = state(module)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for now, then in zip(state(module), before, strict=True):
        same(now, then)
    for number in range(3):
        if number == 1:
            for each in (module, plain):
                each.inner.weight.data = each.inner.weight.data * 5
        x = setting.randn(4, 8, grad=True)
        same(step(graphed, x)[0], step(plain, x)[0])
        for a, b in zip(state(module), state(plain), strict=True):
            same(a, b)


class WritesInBackward(torch.nn.Module):
    def __init__(self, *, parameter):
        super().__init__()
        if parameter:
            self.count = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        else:
            self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, count):
                ctx.count = count
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                ctx.count.add_(1)
                return grad * 2, None

        return Doubled.apply(x, self.count)


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("warmups", [1, 3])
def test_what_a_backward_writes(setting, warmups, parameter):
    module = setting.module(WritesInBackward(parameter=parameter))
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (x,), num_warmup_iters=warmups)
    assert module.count.item() == 0
    for number in range(1, 4):
        step(graphed, x)
        assert module.count.item() == number


class Assigns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x) * self.count


@pytest.mark.parametrize("form", ["module", "method"])
def test_buffers_that_are_assigned_anew_are_refused(setting, form):
    module = setting.module(Assigns())
    before = module.count
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=r"assigns a new tensor to count when it runs.* in place",
    ):
        setting.graphed(
            module if form == "module" else module.forward, (setting.randn(4, 8, grad=True),)
        )
    assert module.count is before
    assert before.item() == 0
