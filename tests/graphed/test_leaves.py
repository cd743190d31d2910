"""Hooks of parameters and of the nodes that add to their gradients: run when they would run without graphs."""

import pytest
import torch

from tests.graphed.steps import net, same_grads, twins
from tests.unit.leaves import visits


def accumulator_of(leaf):
    return torch.autograd.graph.get_gradient_edge(leaf).node


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_parameters_run_once_in_each_backward(setting, before):
    module, plain = twins(setting, net())
    calls = []

    def register():
        for m in (module, plain):
            for p in m.parameters():
                p.register_hook(lambda grad, m=m: calls.append(m) or 2 * grad)

    if before:
        register()
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    assert not calls
    if not before:
        register()
    x = setting.randn(4, 8)
    for fn in (graphed, plain):
        for _ in range(2):
            fn(x).square().sum().backward()
    same_grads(module, plain)
    assert calls.count(module) == calls.count(plain) == 8


def test_hooks_of_parameters_are_no_part_of_what_is_recorded_again(setting):
    module, plain = twins(setting, net())
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    for p in (*module.parameters(), *plain.parameters()):
        p.register_hook(lambda grad: 2 * grad)
    module[0].weight.data = module[0].weight.data.clone()
    x = setting.randn(4, 8)
    for fn in (graphed, plain):
        fn(x).square().sum().backward()
    same_grads(module, plain)


# a forward that makes the node makes it on the stream of the warm-up
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("retain", [False, True])
def test_a_node_that_the_first_forward_hooks(setting, retain):
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.node = None
            self.calls = []

        def forward(self, x):
            if self.node is None:
                self.node = accumulator_of(self.inner[0].weight)
                self.node.register_hook(lambda *grads: self.calls.append(1))
            return self.inner(x)

    module = setting.module(Lazy())
    graphed = setting.graphed(module, (setting.randn(4, 8),), retain_graph_in_backward=retain)
    assert not module.calls
    kept = not retain  # else graphs of ours hold the node, too
    assert (accumulator_of(module.inner[0].weight) == module.node) is kept
    for each in (graphed, graphed, module):
        each(setting.randn(4, 8)).sum().backward()
    assert len(module.calls) == 3 * kept


def test_hooks_of_the_node_of_a_leaf_that_is_frozen_after_recording(setting):
    module = setting.module(net())
    weight = module[0].weight
    node, calls = accumulator_of(weight), []
    node.register_hook(lambda *grads: calls.append(1))

    def thaw(*_):
        weight.requires_grad_(True)

    def freeze(*_):
        weight.requires_grad_(False)

    hooks = [{"pre_forward": thaw, "backward": freeze}]
    setting.graphed(module, (setting.randn(4, 8),), capture_time_hooks=hooks)
    thaw()
    assert accumulator_of(weight) == node
    module(setting.randn(4, 8)).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("retains", [False, True])
def test_gradients_of_parameters_are_added_without_a_task_each(setting, retains):
    """Where a second backward is an error; else it could come at the same time."""
    module, plain = twins(setting, net())
    sample = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (sample,), retain_graph_in_backward=retains)
    parameters = len(list(module.parameters()))
    for _ in range(3):
        x = setting.randn(4, 8, grad=True)
        visited = visits(graphed(x).square().sum().backward)
        assert visited == (parameters + 1 if retains else 1)  # x is a leaf, too
        plain(x).square().sum().backward()
        same_grads(module, plain)
