"""Interleaved pipelines: orders that are refused, and schedules against running the layers without a graph."""

import random

import pytest
import torch

import cgpass
from cgpass.graphed.api import schedule_of
from tests.graphed.steps import clear_grads, net, same_grads, twins

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
        ((1, -1, -1, 1), r"order\[2\] is -1: a backward before the forward"),
        ((1, 1, -1, -1, 2, -2), "1 forwards and 1 backwards of chunk 2, 2 forwards of chunk 1"),
        ((2, -2), "1 forwards and 1 backwards of chunk 2, 0 forwards of chunk 1.*without gaps"),
        ((1, 1, -1), "2 forwards and 1 backwards of chunk 1"),
    ],
)
def test_orders_that_can_not_be_run(order, message):
    with pytest.raises(cgpass.errors.ScheduleError, match=message):
        schedule_of(order, 2, 2)


@pytest.mark.parametrize("args", [((1, 2, -2, -1), 3, 3), ((1, 1, -1, -1), 2, 2)])
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
    assert all(g.stats.plain_calls <= 1 and g.stats.recordings <= 4 for g in graphed)
