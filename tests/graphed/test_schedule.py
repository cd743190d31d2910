"""Interleaved pipelines: orders that are refused, and schedules against running the layers plainly."""

import random

import pytest
import torch

import cgpass
from cgpass.graphed.schedule import schedule_of
from tests.graphed.steps import clear_grads, net, same, same_grads, twins

ORDERS = {
    "1f1b": (1, 1, 2, 2, 1, 1, -2, 2, -2, 2, -1, -2, -1, -2, -1, -1),
    "all forwards first": (1, 1, 1, 1, 2, 2, 2, 2, -2, -2, -2, -2, -1, -1, -1, -1),
    "one by one": (1, 2, -2, -1) * 4,
}


def text(schedule):
    return " ".join(("F" if forward else "B") + str(number) for forward, number in schedule.steps)


def test_an_interleaved_order():
    schedule = schedule_of((1, 1, 2, -2, 2, -1, -2, -1), 4, 8)
    assert schedule.callables == (0, 1, 0, 1, 2, 3, 2, 3)
    assert text(schedule) == "F0 F1 F2 F3 F4 F5 B5 B4 F6 F7 B1 B0 B7 B6 B3 B2"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((), "must be a sequence of chunk numbers"),
        (3, "must be a sequence of chunk numbers"),
        ((1, 0, -1), r"order\[1\] is 0: chunks are ints from 1"),
        ((1, 1.5, -1), r"order\[1\] is 1.5: chunks are ints"),
        ((1, -2, 2, -1), r"order\[1\] is -2: a backward before the forward"),
        ((1, -1, -1, 1), r"order\[2\] is -1: a backward before the forward"),
        (
            (1, 1, -1, -1, 2, -2),
            "1 forwards of chunk 2, 2 of chunk 1\\. Every",
        ),
        ((1, 3, -3, -1), "0 forwards of chunk 2, 1 of chunk 1"),
        (
            (2, -2),
            "1 forwards of chunk 2, 0 of chunk 1.*without gaps",
        ),
        ((1, 1, -1), r"order\[1\] is 1: a forward whose backward never comes"),
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


def build(setting, order, layers=(2, 2), **options):
    num_microbatches = sum(entry == 1 for entry in order)
    modules = [twins(setting, net(dropout=0.1)) for _ in range(sum(layers))]
    count = len(modules) * num_microbatches
    samples = [(setting.randn(4, 8, grad=True),) for _ in range(count)]
    graphed = setting.graphed(
        tuple(module for module, _ in modules),
        samples,
        order=order,
        **options,
    )
    return modules, graphed, num_microbatches


def train(setting, order, layers, num_microbatches, fns):
    """One step of the pipeline on one device: every chunk's boundary is a cut in the graph."""
    torch.manual_seed(1)
    inputs = [torch.randn(4, 8, device=setting.device) for _ in range(num_microbatches)]
    starts = [sum(layers[:chunk]) for chunk in range(len(layers))]
    done = {}
    entering, leaving, outputs = {}, {}, []
    for entry in order:
        chunk = abs(entry) - 1
        microbatch = done[entry] = done.get(entry, -1) + 1
        key = (chunk, microbatch)
        if entry > 0:
            before = leaving.get((chunk - 1, microbatch), inputs[microbatch])
            x = entering[key] = before.detach().clone().requires_grad_()
            for layer in range(layers[chunk]):
                x = fns(starts[chunk] + layer, microbatch)(x)
            leaving[key] = x
            outputs.append(x.detach())
        elif (chunk + 1, microbatch) in entering:
            leaving.pop(key).backward(entering.pop((chunk + 1, microbatch)).grad)
        else:
            leaving.pop(key).square().sum().backward()
    return outputs


@pytest.mark.parametrize("name", ORDERS)
def test_two_chunks_and_four_microbatches(setting, name):
    order, layers = ORDERS[name], (2, 2)
    modules, graphed, count = build(setting, order, layers)

    def graph_of(layer, microbatch):
        chunk = 0 if layer < layers[0] else 1
        start = sum(layers[:chunk])
        return graphed[start * count + microbatch * layers[chunk] + layer - start]

    plain_of = lambda layer, microbatch: modules[layer][1]  # noqa: E731
    for _ in range(3):
        found = train(setting, order, layers, count, graph_of)
        expected = train(setting, order, layers, count, plain_of)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        for module, plain in modules:
            same_grads(module, plain)
        clear_grads(*(each for pair in modules for each in pair))
    assert {g.stats.plain_calls for g in graphed} == {0}
    assert {g.stats.recordings for g in graphed} == {2}


def test_warm_ups_follow_the_order(setting):
    seen = []
    modules = [setting.module(net()) for _ in range(2)]
    names = dict(zip(modules, "ab", strict=True))
    hooks = [
        {
            "pre_forward": lambda m, *rest: seen.append(names[m]),
            "pre_backward": lambda m: seen.append("-" + names[m]),
        }
    ] * 2
    setting.graphed(
        tuple(modules),
        [(setting.randn(4, 8),) for _ in range(4)],
        order=(1, 2, -2, 1, -1, 2, -2, -1),
        num_warmup_iters=1,
        capture_time_hooks=hooks,
    )
    warm_ups = ["a", "-a", "b", "-b", "a", "-a", "b", "-b"]
    assert seen == [*warm_ups, "a", "b", "-b", "a", "-a", "b", "-b", "-a"]


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


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(setting, seed):
    """Chunks that don't hand anything on, recorded in one order and called in others."""
    draw = random.Random(seed)
    layers, microbatches = (2, 2), 3
    modules, graphed, count = build(setting, random_order(draw, 2, microbatches), layers)
    starts = {1: 0, 2: layers[0] * count}
    for number in range(3):
        order = random_order(draw, 2, microbatches)
        for plainly in (False, True):
            torch.manual_seed(number)
            done, pending = dict.fromkeys((1, 2, -1, -2), 0), {}
            for entry in order:
                chunk, size = abs(entry), layers[abs(entry) - 1]
                microbatch = done[entry]
                done[entry] += 1
                if entry < 0:
                    pending.pop((chunk, microbatch)).square().sum().backward()
                    continue
                x = setting.randn(4, 8, grad=True)
                for layer in range(size):
                    own = modules[layer if chunk == 1 else layers[0] + layer][1]
                    x = (own if plainly else graphed[starts[chunk] + microbatch * size + layer])(x)
                pending[chunk, microbatch] = x
        for module, plain in modules:
            same_grads(module, plain)
        clear_grads(*(each for pair in modules for each in pair))
