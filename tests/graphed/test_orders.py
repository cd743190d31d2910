"""Forwards and backwards in other orders than they were recorded in, and recordings while a forward is pending."""

import itertools
import random

import torch

from tests.graphed.steps import clear_grads, net, same, same_grads, twins


def pairs(setting, number, **options):
    modules = [twins(setting, net(dropout=0.2)) for _ in range(number)]
    samples = tuple((setting.randn(4, 8, grad=True),) for _ in modules)
    graphed = setting.graphed(tuple(m for m, _ in modules), samples, **options)
    return modules, list(zip(graphed, [plain for _, plain in modules], strict=True))


def run(setting, fns, order):
    """Forwards (positive) and backwards (negative) of numbered functions, each as often as it occurs."""
    torch.manual_seed(11)
    pending, found = {}, []
    inputs = {}
    for entry in order:
        index = abs(entry) - 1
        if entry > 0:
            x = torch.randn(4, 8, device=setting.device).requires_grad_()
            y = fns[index](x)
            pending.setdefault(index, []).append(y)
            inputs[id(y)] = x
            found.append(y.detach())
        else:
            y = pending[index].pop(0)
            (y * y).sum().backward()
            found.append(inputs[id(y)].grad)
    return found


def check(setting, modules, both, order):
    clear_grads(*itertools.chain(*modules))
    found = run(setting, [graphed for graphed, _ in both], order)
    same(found, run(setting, [plain for _, plain in both], order))
    for module, plain in modules:
        same_grads(module, plain)


def test_random_orders(setting):
    """Pending calls need recordings of their own, and a few of them serve any order."""
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
    stats = [graphed.graphed.stats for graphed, _ in both]
    assert all(s.plain_calls <= 1 and s.recordings <= 6 for s in stats), stats


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(1.0)  # counted as a change, though the value is the same
        return self.last(self.norm(self.first(x)).relu() * self.scale.clone())


def unfreeze(module, fn, xs):
    module.first.requires_grad_(False)
    one = fn(xs[0]).sum()
    module.first.requires_grad_(True)
    (one + fn(xs[1]).sum()).backward()


def test_a_recording_leaves_pending_backwards_alone(setting):
    module, plain = twins(setting, Normed())
    graphed = setting.graphed(module, (setting.randn(8, 4),))
    for _ in range(2):
        xs = [setting.randn(8, 4) for _ in range(2)]
        for each, fn in ((module, graphed), (plain, plain)):
            unfreeze(each, fn, xs)
        same_grads(module, plain)
        same([*module.buffers()], [*plain.buffers()])
    assert graphed.graphed.stats.plain_calls == 0
