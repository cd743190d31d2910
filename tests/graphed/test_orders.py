"""Forwards and backwards in other orders than they were recorded in, and recordings while a forward is pending."""

import itertools
import random

import pytest
import torch

import cgpass
from cgpass.graphed.api import schedule_of
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
    stats = [graphed.graphed.stats for graphed, _ in both]
    assert {(s.plain_calls, s.recordings) for s in stats} == {(0, 2)}


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
        for found, expected in zip(module.buffers(), plain.buffers(), strict=True):
            same(found, expected)
    assert graphed.graphed.stats.plain_calls == 0


# ---- interleaved pipelines: orders that are refused, and schedules against running the layers without a graph


ORDERS = {
    "1f1b": (1, 1, 2, 2, 1, 1, -2, 2, -2, 2, -1, -2, -1, -2, -1, -1),
    "all forwards first": (1, 1, 1, 1, 2, 2, 2, 2, -2, -2, -2, -2, -1, -1, -1, -1),
    "one by one": (1, 2, -2, -1) * 4,
}


def test_an_interleaved_order():
    numbers, steps = schedule_of((1, 1, 2, -2, 2, -1, -2, -1), 4, 8)
    assert numbers == [0, 1, 0, 1, 2, 3, 2, 3]
    text = " ".join(("F" if forward else "B") + str(number) for forward, number in steps)
    assert text == "F0 F1 F2 F3 F4 F5 B5 B4 F6 F7 B1 B0 B7 B6 B3 B2"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((), "must be a sequence of chunk numbers"),
        (3, "must be a sequence of chunk numbers"),
        ((1, 0, -1), r"order\[1\] is 0: chunks are ints from 1"),
        ((1, 1.5, -1), r"order\[1\] is 1.5: chunks are ints"),
        ((1, -2, 2, -1), r"order\[1\] is -2: a backward before the forward"),
        ((1, -1, -1, 1), r"order\[2\] is -1: a backward before the forward"),
        ((1, 1, -1, -1, 2, -2), "1 forwards and 1 backwards of chunk 2, 2 forwards of chunk 1"),
        ((1, 3, -3, -1), "0 forwards and 0 backwards of chunk 2, 1 forwards of chunk 1"),
        ((2, -2), "1 forwards and 1 backwards of chunk 2, 0 forwards of chunk 1.*without gaps"),
        ((1, 1, -1), "2 forwards and 1 backwards of chunk 1"),
    ],
)
def test_orders_that_can_not_be_run(order, message):
    with pytest.raises(cgpass.errors.ScheduleError, match=message):
        schedule_of(order, 2, 2)


@pytest.mark.parametrize(
    "args", [((1, 2, -2, -1), 3, 3), ((1, 1, -1, -1), 2, 2), ((1, -1), 2, 1), ((1, -1), 1, 2)]
)
def test_numbers_that_do_not_fit_the_order(args):
    message = f"{args[1]} callables, but {args[2]} samples, for .* chunks and .* microbatches"
    with pytest.raises(cgpass.errors.ScheduleError, match=message):
        schedule_of(*args)


def build(setting, order):
    count = order.count(1)
    modules = [twins(setting, net(dropout=0.1)) for _ in range(4)]
    samples = [(setting.randn(4, 8, grad=True),) for _ in range(4 * count)]
    return (
        modules,
        setting.graphed(tuple(module for module, _ in modules), samples, order=order),
        count,
    )


def random_order(draw, chunks, microbatches):
    """A pipeline's order that can be run: forwards and backwards of each chunk in turn, as they come."""
    left = {
        1: dict.fromkeys(range(1, chunks + 1), microbatches),
        -1: dict.fromkeys(range(1, chunks + 1), microbatches),
    }
    order = []
    while any(left[-1].values()):
        chunk = draw.randint(1, chunks)
        kinds = [1] * (left[1][chunk] > 0) + [-1] * (left[-1][chunk] > left[1][chunk])
        if kinds:
            kind = draw.choice(kinds)
            left[kind][chunk] -= 1
            order.append(kind * chunk)
    return order


@pytest.mark.parametrize("recorded", [*ORDERS, 0, 1, 2])
def test_schedules(setting, recorded):
    """Chunks that don't hand anything on, called in the order in which they were recorded, and in others."""
    draw, layers = random.Random(0 if recorded in ORDERS else recorded), 2
    order = ORDERS[recorded] if recorded in ORDERS else random_order(draw, 2, 3)
    modules, graphed, count = build(setting, order)
    for number in range(4):
        for plainly in (False, True):
            torch.manual_seed(number)
            done, pending = dict.fromkeys((1, 2, -1, -2), 0), {}
            for entry in order:
                chunk, microbatch = abs(entry), done[entry]
                done[entry] += 1
                if entry < 0:
                    pending.pop((chunk, microbatch)).square().sum().backward()
                    continue
                x = setting.randn(4, 8, grad=True)
                for layer in range(layers):
                    own = modules[(chunk - 1) * layers + layer][1]
                    place = ((chunk - 1) * count + microbatch) * layers + layer
                    x = (own if plainly else graphed[place])(x)
                pending[chunk, microbatch] = x
        for module, plain in modules:
            same_grads(module, plain)
        clear_grads(*(each for pair in modules for each in pair))
        if number == 1:
            assert {(g.stats.plain_calls, g.stats.recordings) for g in graphed} == {(0, 2)}
        if number:
            order = random_order(draw, 2, count)
    assert {g.stats.recordings for g in graphed} == {2}
