"""Options together: what one hands on to others is not what another one promises to keep."""

import pytest
import torch

from tests.graphed.steps import net, same, same_grads, twins
from tests.graphed.test_weight_grads import Split

RUNS = {
    "as recorded": ["f0", "b0", "f1", "b1"],
    "another order": ["f0", "f1", "b0", "b1"],
    "once more at the end": ["f0", "b0", "f1", "b1", "b0"],
}


def run(fns, module, xs, steps, *, weight_grads=None):
    """Gradients of inputs and parameters; `weight_grads`: what makes those that were split off, after each backward."""
    module.zero_grad()
    inputs = [x.clone().requires_grad_() for x in xs]
    losses = {}
    for i, step in enumerate(steps):
        kind, number = step[0], int(step[1:])
        if kind == "f":
            losses[number] = fns[number](inputs[number]).square().sum()
        elif kind == "b":
            losses[number].backward(retain_graph=step in steps[i + 1 :])
        elif weight_grads is not None:
            weight_grads[number]()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("steps", RUNS.values(), ids=RUNS)
def test_microbatches_whose_backwards_may_run_again(setting, steps):
    module, plain = twins(setting, net())
    graphed = setting.graphed(
        (module,),
        tuple((setting.randn(2, 8, grad=True),) for _ in range(2)),
        order=[1, -1, 1, -1],
    )
    for _ in range(2):
        xs = setting.randn(2, 2, 8)
        found = run(graphed, module, xs, steps)
        expected = run([plain] * 2, plain, xs, steps)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        same_grads(module, plain)


@pytest.mark.parametrize(
    "steps",
    [
        ["f0", "b0", "w0", "f1", "f2", "b1", "w1", "b2", "w2"],
        ["f0", "f1", "f2", "b0", "b1", "b2", "w0", "w1", "w2"],
        ["f0", "b0", "f1", "f2", "b1", "b2", "w0", "w1", "w2"],
    ],
    ids=["as recorded", "forwards first", "weights last"],
)
def test_weight_gradients_that_come_late(setting, steps):
    module, plain = twins(setting, Split())
    plain.split = False
    graphed = setting.graphed(
        (module,),
        tuple((setting.randn(4, 8, grad=True),) for _ in range(3)),
        order=[1, -1, 1, 1, -1, -1],
    )
    late = [fn.backward_dw for fn in graphed]
    for _ in range(2):
        xs = setting.randn(3, 4, 8)
        found = run(graphed, module, xs, steps, weight_grads=late)
        expected = run([plain] * 3, plain, xs, steps)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        same(module.bias.grad, plain.bias.grad)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)
