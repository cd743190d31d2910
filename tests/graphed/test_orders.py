"""Forwards and backwards in other orders than they were recorded in."""

import itertools
import random

import pytest
import torch

from tests.graphed.steps import clear_grads, net, same, same_grads, twins


def pairs(setting, number, **options):
    modules = [twins(setting, net(dropout=0.2)) for _ in range(number)]
    samples = tuple((setting.randn(4, 8, grad=True),) for _ in modules)
    graphed = setting.graphed(tuple(m for m, _ in modules), samples, **options)
    return modules, list(zip(graphed, [plain for _, plain in modules], strict=True))


def run(setting, fns, order, retain=()):
    """Forwards (positive) and backwards (negative) of numbered functions, each as often as it occurs."""
    torch.manual_seed(11)
    pending, found = {}, []
    inputs = {}
    for position, entry in enumerate(order):
        index = abs(entry) - 1
        if entry > 0:
            x = torch.randn(4, 8, device=setting.device).requires_grad_()
            y = fns[index](x)
            pending.setdefault(index, []).append(y)
            inputs[id(y)] = x
            found.append(y.detach())
        else:
            y = pending[index].pop(0)
            (y * y).sum().backward(retain_graph=position in retain)
            found.append(inputs[id(y)].grad)
            if position in retain:
                pending[index].insert(0, y)
    return found


def check(setting, modules, both, order, **kwargs):
    clear_grads(*itertools.chain(*modules))
    found = run(setting, [graphed for graphed, _ in both], order, **kwargs)
    expected = run(setting, [plain for _, plain in both], order, **kwargs)
    for a, b in zip(found, expected, strict=True):
        same(a, b)
    for module, plain in modules:
        same_grads(module, plain)


def test_the_recorded_order_copies_nothing_aside(setting):
    modules, both = pairs(setting, 3)
    stats = [graphed.graphed.stats for graphed, _ in both]
    for _ in range(3):
        check(setting, modules, both, (1, 2, 3, -3, -2, -1))
    assert [s.plain_calls for s in stats] == [0, 0, 0]


@pytest.mark.parametrize(
    "order",
    [
        (1, 2, 3, -1, -2, -3),
        (3, 2, 1, -1, -2, -3),
        (2, 3, -2, 1, -3, -1),
        (1, 1, -1, -1),
        (3, 1, 3, 2, 1, -3, -1, -2, -1, -3),
    ],
    ids=str,
)
def test_another_order_gives_the_same_numbers(setting, order):
    modules, both = pairs(setting, 3)
    for _ in range(2):
        check(setting, modules, both, order)
    recordings = [graphed.graphed.stats.recordings for graphed, _ in both]
    check(setting, modules, both, order)
    assert [graphed.graphed.stats.recordings for graphed, _ in both] == recordings
    assert [graphed.graphed.stats.plain_calls for graphed, _ in both] == [0, 0, 0]


def test_random_orders(setting):
    modules, both = pairs(setting, 3)
    draw = random.Random(5)
    for _ in range(12):
        order, due = [], []
        for _ in range(draw.randint(4, 12)):
            if due and draw.random() < 0.5:
                order.append(-due.pop(draw.randrange(len(due))))
            else:
                order.append(draw.randint(1, 3))
                due.append(order[-1])
        check(setting, modules, both, [*order, *(-d for d in due)])


def test_forwards_whose_backward_never_comes(setting):
    modules, both = pairs(setting, 2)
    for _ in range(5):
        check(setting, modules, both, (1, 2, 1, 2, 2))
    check(setting, modules, both, (1, 2, -2, -1))
    assert sum(graphed.graphed.stats.rescued_bytes for graphed, _ in both) < 10**6


def test_a_second_backward(setting):
    modules, both = pairs(setting, 2)
    for order, retain in (
        ((1, 2, -2, -2, -1, -1), (2, 4)),
        ((1, -1, 2, -2, -1), (1,)),
        ((1, -1, 1, -1, -1), (1,)),
    ):
        check(setting, modules, both, order, retain=retain)


def test_a_backward_whose_parameters_moved_is_told_of_once(setting, caplog):
    module, plain = twins(setting, net())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for _ in range(2):
        x = setting.randn(4, 8)
        outs = graphed(x), plain(x)
        for each in (module, plain):
            each[0].weight.data = each[0].weight.data.clone()
        for out in outs:
            out.square().sum().backward()
        same_grads(module, plain)
    assert caplog.text.count("runs a backward without a graph: its parameters moved") == 1
