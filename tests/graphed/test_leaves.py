"""Hooks of parameters and of the nodes that add to their gradients: run when they would run without graphs."""

import pytest

from tests.graphed.steps import net, same_grads, twins
from tests.unit.leaves import visits


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
