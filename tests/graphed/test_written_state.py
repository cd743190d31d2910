"""Parameters and buffers that callables write while they run."""

import pytest
import torch

import cgpass
from tests.graphed.steps import check, graphed_twins, same, step, twins
from tests.usage.programs import state

WAYS = {
    "frozen": lambda module: module.frozen.add_(1),
    "data": lambda module: module.frozen.data.add_(1),
    "clipped": lambda module: module.inner.weight.clamp_(-0.1, 0.1),
    "clipped data": lambda module: module.inner.weight.data.clamp_(-0.1, 0.1),
    "buffer": lambda module: module.count.add_(1),
}


class Writes(torch.nn.Module):
    """Writes one of its tensors in each forward."""

    def __init__(self, way):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))
        self.way = way

    def forward(self, x):
        with torch.no_grad():
            WAYS[self.way](self)
        return self.inner(x) + self.frozen + self.count


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_writes_is_put_back_and_then_written_by_calls(setting, way):
    module, plain = twins(setting, Writes(way))
    before = state(module)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    same(state(module), before)
    for number in range(3):
        if number == 1:
            for each in (module, plain):
                each.inner.weight.data = each.inner.weight.data * 5
        check(setting, graphed, plain)
        same(state(module), state(plain))


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


def gives_weight(module, x):
    weight = module.inner.weight
    weight.data = torch.nn.functional.normalize(weight.data, dim=1)
    return module.inner(x)


def gives_buffer(module, x):
    module.count.set_(module.count + 1)
    return module.inner(x) * module.count


def gives_argument(module, x):
    x.data = x.data * 2
    return module.inner(x)


class AddsToGrad(torch.autograd.Function):
    """A checkpoint of one's own: its backward runs autograd, which adds to the weights' `.grad`."""

    @staticmethod
    def forward(ctx, x, fn):
        ctx.x, ctx.fn = x.detach(), fn
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.fn(x), grad)
        return x.grad, None


NOT_REPLAYED = {
    "a weight's data": (gives_weight, r"assigns a new tensor to inner\.weight"),
    "a buffer's memory": (gives_buffer, "assigns a new tensor to count"),
    "an argument's data": (gives_argument, r"gives args\[0\] new data"),
    "a gradient": (
        lambda module, x: AddsToGrad.apply(x, module.inner),
        r"adds to inner\.(weight|bias)\.grad in its backward",
    ),
}


def trains_inside(module, x):
    module.inner(x).square().sum().backward()
    return x.detach() * 2


NOT_REPLAYED["a gradient of the forward"] = (
    trains_inside,
    r"adds to (inner\.weight|inner\.bias|args\[0\])\.grad when it runs",
)


@pytest.mark.parametrize("what", NOT_REPLAYED)
def test_what_a_replay_would_not_do_is_refused(setting, what):
    run, match = NOT_REPLAYED[what]

    class Module(Assigns):
        def forward(self, x):
            return run(self, x)

    with pytest.raises(cgpass.errors.GraphedArgumentError, match=match):
        setting.graphed(setting.module(Module()), (setting.randn(4, 8, grad=True),))


class Moves(Assigns):
    """As cuDNN's RNNs, whose weights are made one piece of memory."""

    def forward(self, x):
        for each in self.inner.parameters():
            each.data = each.data.clone()
        return self.inner(x)


def test_members_that_only_move_are_no_new_values(setting):
    graphed, module, plain = graphed_twins(setting, Moves())
    for _ in range(3):
        check(setting, graphed, plain, grad=False)
        with torch.no_grad():
            for each in (module, plain):
                each.inner.weight.mul_(0.9)
    assert graphed.graphed.stats.plain_calls == 0
