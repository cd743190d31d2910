"""Parameters, modes, autocast and random numbers of graphed callables, against running them without a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize

import cgpass
from tests.graphed.steps import check, graphed_twins, net, same, same_grads, step, twins


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
