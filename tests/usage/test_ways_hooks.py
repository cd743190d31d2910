"""Hooks of every kind: on tensors, on what is saved, on modules and on gradients' accumulation."""

import collections

import torch

from tests.usage import programs
from tests.usage.programs import MLP, assert_replays


def save_on_cpu(session):
    module, call = session.compiled(MLP)
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        with torch.autograd.graph.save_on_cpu():
            first = call(batch)
            second = call(first)
        (second if number % 2 else first + second).square().mean().backward()
        values += [first.detach(), second.detach(), *programs.gradients(module)]
        module.zero_grad()
    return values


def test_save_on_cpu(way):
    counters = way.compare(save_on_cpu)
    assert counters["replays"] > 0, counters


def test_saved_tensors_are_packed_as_other_dtypes_now_and_then(way):
    def pack(t):
        return t.double() if t.is_floating_point() else t

    def unpack(t):
        return t.float() if t.is_floating_point() else t

    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            if number % 4 == 3:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    out = call(batch)
            else:
                out = call(batch)
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    counters = way.compare(program)
    assert counters["replays"] > 0, counters


def test_hooks_of_tensors_fire_once_a_step(way):
    def program(session):
        module, call = session.compiled(MLP)
        fired = collections.Counter()
        for p in module.parameters():
            p.register_hook(lambda g: (fired.update(["parameter"]), g * 2)[1])
        values = []
        for batch in session.batches(4, 8, count=8):
            batch.requires_grad_()
            batch.register_hook(lambda g: fired.update(["input"]))
            out = call(batch)
            out.retain_grad()
            out.register_hook(lambda g: (fired.update(["output"]), g * 3)[1])
            out.square().mean().backward()
            values += [out.grad, batch.grad, *programs.gradients(module)]
            module.zero_grad()
        return [*values, fired["parameter"], fired["input"], fired["output"]]

    counters = way.compare(program)
    assert_replays(counters)
    assert way.run(program)[-4:-1] == [8 * 4, 8, 8]


def optimizer_in_the_backward(session):
    """Each parameter is stepped as soon as its gradient is there, and the gradient dropped."""
    module, call = session.compiled(MLP)
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in module.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    values = []
    for batch in session.batches(4, 8, count=8):
        out = call(batch)
        out.square().mean().backward()
        values.append(out.detach())
    return values + programs.state(module)


def test_the_optimizer_steps_in_post_accumulate_hooks(slow_way):
    assert_replays(slow_way.compare(optimizer_in_the_backward))


def test_hooks_of_modules_fire_once_a_step(way):
    def program(session):
        module, fired = session.module(MLP), collections.Counter()
        module.register_full_backward_hook(lambda m, gin, gout: fired.update(["backward"]))
        call = session.compile(module)
        last = module.layers[-1]
        call.register_forward_pre_hook(lambda m, args: fired.update(["before"]))
        call.register_forward_hook(lambda m, args, out: fired.update(["after"]))
        last.register_forward_hook(lambda m, args, out: out * 2)
        values = []
        for batch in session.batches(4, 8, count=8):
            out = call(batch.requires_grad_())
            out.square().mean().backward()
            values += [out.detach(), batch.grad, *programs.gradients(module)]
            module.zero_grad()
        return [*values, fired["before"], fired["after"], fired["backward"]]

    way.compare(program)
    assert way.run(program)[-4:-1] == [8, 8, 8]


def test_hooks_of_modules_inside_keep_the_activations(way):
    def program(session):
        module, seen, kept = session.module(MLP), {}, []
        for number, layer in enumerate(module.layers):
            layer.register_forward_hook(lambda m, args, out, n=number: seen.update({n: out}))
        call = session.compile(module)
        values = []
        for batch in session.batches(4, 8, count=8):
            out = call(batch)
            out.square().mean().backward()
            kept += seen.values()
            values += [out.detach(), *programs.gradients(module)]
        return [*values, *(activation.detach() for activation in kept)]

    counters = way.compare(program)
    assert counters["replays"] > 0, counters
