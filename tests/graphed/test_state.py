"""Parameters, modes, autocast and random numbers of graphed callables, against running them without a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize

import cgpass
from tests.graphed.steps import check, graphed_twins, net, same, same_grads, step, twins
from tests.usage.programs import state


def test_unused_inputs_and_parameters(setting):
    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, y):
            return self.used(x)

    module, plain = twins(setting, Partly())
    args = (setting.randn(2, 4), setting.randn(2, 4, grad=True))
    graphed = setting.graphed(module, args)
    found, expected = step(graphed, *args), step(plain, *args)
    assert found[1] == expected[1] == [None, None]
    same_grads(module, plain)
    assert module.unused.weight.grad is None


def test_eval_runs_the_original_and_the_other_way_round(setting):
    for training in (True, False):
        module, plain = twins(setting, net(dropout=0.5))
        module.train(training)
        graphed = setting.graphed(module, (setting.randn(4, 8),))
        for mode in (training, not training, training):
            graphed.train(mode)
            plain.train(mode)
            check(setting, graphed, plain, grad=False)
        stats = graphed.graphed.stats
        assert (stats.calls, stats.plain_calls) == (3, 1)


def test_no_grad(setting):
    graphed, module, plain = graphed_twins(setting, net(), grad=False)
    x = setting.randn(4, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(graphed(x), plain(x))
            assert not graphed(x).requires_grad
    check(setting, graphed, plain, 3, grad=False)
    with torch.no_grad():
        only_forward = setting.graphed(module, (setting.randn(4, 8),))
        same(only_forward(x), plain(x))
    assert only_forward.graphed.stats.recordings == 1
    assert only_forward(x).requires_grad
    assert only_forward.graphed.stats.plain_calls == 1


def test_parameters_made_in_inference_mode(setting):
    with torch.inference_mode():
        module = setting.module(net()).requires_grad_(False)
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    for _ in range(2):
        x = setting.randn(4, 8)
        same(graphed(x), module(x))
        with torch.inference_mode():
            for p in module.parameters():
                p.mul_(1.5)
            same(graphed(x), module(x))
    assert graphed.graphed.stats.plain_calls == 0


def penalty(gradient):
    return (gradient.norm(dim=1) - 1).square().mean()


DIFFERENTIATED = {
    "grad": torch.autograd.grad,
    "backward": lambda loss, wanted: loss.backward(),
    "inputs": lambda loss, wanted: loss.backward(inputs=wanted),
}


@pytest.mark.parametrize("how", DIFFERENTIATED)
@pytest.mark.parametrize("of", ["parameters", "what came before", "the argument", "the loss"])
def test_gradients_of_gradients_are_refused(setting, how, of):
    """Whichever gradients are wanted: none may lack a part."""
    before, module = setting.module(torch.nn.Linear(8, 8)), setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    x, scale = setting.randn(4, 8, grad=True), setting.randn(1, grad=True)
    out = graphed(before(x))
    (gradient,) = torch.autograd.grad((out * scale).sum(), x, create_graph=True)
    wanted = {
        "parameters": list(module.parameters()),
        "what came before": list(before.parameters()),
        "the argument": [x],
        "the loss": [scale],
    }[of]
    with pytest.raises(cgpass.errors.GraphedBackwardError, match="gradients of its gradients"):
        DIFFERENTIATED[how](out.mean() + penalty(gradient), wanted)


def test_graphs_of_gradients_that_nobody_differentiates(setting):
    graphed, module, plain = graphed_twins(setting, net())
    x = setting.randn(4, 8, grad=True)
    for fn in (graphed, plain):
        (gradient,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        (fn(x).mean() + penalty(gradient.detach())).backward()
    same_grads(module, plain)


def test_no_driver(setting):
    module = setting.module(net())
    x = setting.randn(4, 8)
    options = cgpass.GraphedOptions(driver="none")
    graphed = cgpass.make_graphed_callables(module, (x,), options=options)
    same(graphed(x), module(x))
    assert graphed.graphed.stats.recordings == 0
    assert F.relu is cgpass.make_graphed_callables(F.relu, (x,), options=options).ungraphed


@pytest.mark.parametrize("again", [False, True])
def test_recorded_while_parametrizations_are_cached(setting, again):
    """`parametrize.cached()` keeps a weight, with its graph, for the block."""
    module, plain = twins(setting, torch.nn.Linear(8, 8))
    for each in (module, plain):
        parametrize.register_parametrization(each, "weight", torch.nn.Tanh())
    x = setting.randn(4, 8, grad=True)
    if again:
        graphed = setting.graphed(module, (x,))
        bias = module.bias
        bias.data = bias.data.clone()
    with parametrize.cached():
        kept = module.weight
        graphed = graphed if again else setting.graphed(module, (x,))
        check(setting, graphed, plain)
        assert module.weight is kept
    assert module.weight is not kept
    check(setting, graphed, plain, 2)
    stats = graphed.graphed.stats
    assert (stats.plain_calls, stats.rerecordings) == (0, again)


# ---- parameters and buffers that callables write while they run


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
