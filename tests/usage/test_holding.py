"""What a user holds keeps its value, and forwards and backwards come in any order."""

import pytest
import torch

from tests.usage import programs
from tests.usage.programs import MLP, Block, assert_steady


def held_outputs(session):
    """Outputs, views of them and gradients are kept over all later calls."""
    module, call = session.compiled(MLP)
    held, kept = [], []
    for batch in session.batches(4, 8):
        out = call(batch)
        out.square().mean().backward()
        held += [out.detach(), out.detach()[1:]]
        held += [parameter.grad for parameter in module.parameters()]
        kept.append(out)
        module.zero_grad(set_to_none=True)
    return held


def test_outputs_and_gradients_stay(setting):
    assert_steady(setting.compare(held_outputs), captured=2)


def test_outputs_and_gradients_stay_through_inductor(setting):
    assert_steady(setting.compare(held_outputs, compiler="inductor"), captured=2)


def pending_forwards(order):
    """Some forwards run before their backwards, which come in the given order."""

    def program(session):
        module, call = session.compiled(Block)
        call(session.randn(2, 6, 16)).sum().backward()
        values = programs.gradients(module)
        for _ in range(3):
            outs = [call(batch) for batch in session.batches(2, 6, 16, count=len(order))]
            for number in order:
                outs[number].square().mean().backward()
            values += [out.detach() for out in outs]
            values += programs.gradients(module)
            module.zero_grad(set_to_none=True)
        return values

    return program


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_forwards_before_their_backwards(setting, order):
    assert_steady(setting.compare(pending_forwards(order)), captured=2, recordings=6)


def interleaved(session):
    """A pipeline: every backward comes one step after the next forward."""
    module, call = session.compiled(Block)
    values, before = [], None
    for batch in session.batches(2, 6, 16, count=10):
        out = call(batch)
        if before is not None:
            before.square().mean().backward()
            values += [before.detach(), *programs.gradients(module)]
            module.zero_grad(set_to_none=True)
        before = out
    return values


def test_each_backward_after_the_next_forward(setting):
    counters = setting.compare(interleaved)
    assert counters["plain_calls"] == 0, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0, counters


def test_a_forward_whose_backward_never_comes(setting):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            out = call(batch)
            values.append(out.detach())
            if number % 3 != 1:
                out.square().mean().backward()
            del out
        return values + programs.gradients(module)

    assert_steady(setting.compare(program), captured=2)


def test_retained_graph(setting):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8):
            loss = call(batch).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            values += programs.gradients(module)
        return values

    counters = setting.compare(program)
    # both backwards of the warmed up forward find its saved tensors outside the pool: they warm up
    assert_steady(counters, captured=2, warmups=3)
    assert counters["calls"] == 8 + 16


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_graph_retained_only_after_the_backward_was_compiled(setting, compiler):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8)):
            loss = call(batch).square().mean()
            if number >= 3:
                loss.backward(retain_graph=True)
            loss.backward()
            values += programs.gradients(module)
        return values

    setting.compare(program, compiler=compiler)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(setting, set_to_none):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            (call(batch).square().mean() / 4).backward()
            if number % 4 == 3:
                values += programs.gradients(module)
                module.zero_grad(set_to_none=set_to_none)
        return values

    assert_steady(setting.compare(program), captured=2)


def test_an_output_edited_in_place(setting):
    def program(session):
        _, call = session.compiled(MLP)
        values, edited = [], []
        with torch.no_grad():
            for batch in session.batches(4, 8):
                out = call(batch)
                values.append(out.clone())
                edited.append(out.mul_(2).add_(1))
        return values + edited

    assert_steady(setting.compare(program), captured=1)


def test_an_output_fed_back_as_input(setting):
    def program(session):
        _, call = session.compiled(MLP)
        x = session.randn(4, 8)
        values = []
        with torch.no_grad():
            for _ in range(8):
                x = call(x)
                values.append(x)
        return values

    assert_steady(setting.compare(program), captured=1)


def test_outputs_that_share_memory_share_it_for_the_user(setting):
    def program(session):
        def fn(x):
            y = x * 2 + 1
            y = y.sin().cos()
            return y, y.view(-1), y[1:]

        call = session.compile(fn)
        values = []
        for batch in session.batches(4, 8):
            whole, flat, part = call(batch)
            whole.add_(1)
            values += [whole, flat, part]
        return values

    assert_steady(setting.compare(program), captured=1)


def test_gradients_of_inputs(setting):
    def program(session):
        _, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8):
            batch.requires_grad_()
            call(batch).square().mean().backward()
            values.append(batch.grad)
        return values

    assert_steady(setting.compare(program), captured=2)


def test_saved_tensor_hooks_move_what_was_saved(setting):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8, count=16):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                out = call(batch)
            out.square().mean().backward()
            values += programs.gradients(module)
        return values

    counters = setting.compare(program)
    assert counters["replays"] > 0, counters
