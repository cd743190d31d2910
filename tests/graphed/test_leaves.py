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


def test_gradients_of_parameters_are_added_without_a_task_each(setting):
    module, plain = twins(setting, net())
    sample = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (sample,))
    for _ in range(3):
        x = setting.randn(4, 8, grad=True)
        visited = visits(graphed(x).square().sum().backward)
        assert visited == 1  # of x, a leaf, too
        plain(x).square().sum().backward()
        same_grads(module, plain)
