"""Inputs: written ones, the same one twice, views of each other, other kinds than float tensors."""

import pytest
import torch

from tests.usage.programs import ATEN, Counter, Ways, assert_steady, long_enough, steady

ways = Ways(*ATEN)


def mutated_input(session):
    """A buffer and an input are changed by every call."""
    module, call = session.compiled(Counter)
    state = session.tensor([1.0, 2.0, 3.0])
    outs = [call(batch, state) for batch in session.batches(4, 8)]
    return [*outs, module.seen, state]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_mutated_input_is_written_back(setting, compiler):
    assert_steady(setting.compare(mutated_input, compiler=compiler), captured=1)


@ways(counts=steady(1))
def another_tensor_mutated_by_each_call(session):
    _, call = session.compiled(Counter)
    for _ in range(6):
        state = session.randn(3)
        yield [call(session.randn(4, 8), state), state]


def product(a, b):
    return (a.sin() * 2 - b.cos()) * (a + b)


def two_inputs(session):
    """Two inputs of one shape and other values."""
    call = session.compile(product)
    return [call(session.randn(4, 8), session.randn(4, 8)) for _ in range(6)]


ways(counts=steady(1))(two_inputs)


@ways(counts=steady(2))
def the_same_tensor_twice_and_two_tensors_alternate(session):
    call = session.compile(product)
    for number in range(8):
        a = session.randn(4, 8)
        yield [call(a, a if number % 2 else session.randn(4, 8))]


@ways(counts=steady(1))
def the_same_tensor_twice_and_mutated(session):
    def fn(a, b):
        a.add_(1)
        return (b.sin() * 2).cos() + a

    call = session.compile(fn)
    for a in session.batches(4, 8, count=6):
        yield [call(a, a), a]


@ways(replays="some")
def a_mutated_view_changes_its_base(session):
    def fn(base, part):
        part.mul_(2).add_(1)
        return (base.sin() + 1).cos()

    call = session.compile(fn)
    for base in session.batches(4, 8, count=6):
        yield [call(base, base[1:3]), base]


@ways(counts=steady(1))
def strided_expanded_and_integer_inputs(session):
    def fn(transposed, expanded, index, flag):
        x = transposed.sin() + expanded
        return torch.where(flag, x[index], -x[index]) * 2

    call = session.compile(fn)
    for number in range(6):
        index = session.tensor([number % 4, 1, 2])
        flag = session.tensor([True, number % 2 == 0, False])[:, None]
        yield [call(session.randn(8, 4).t(), session.randn(1, 8).expand(4, 8), index, flag)]


@ways(counts=steady(1))
def an_output_that_is_an_input_or_a_view_of_one(session):
    def fn(x, y):
        x.add_(1)
        return x, x.view(-1), (x * y).sin().cos()

    call = session.compile(fn)
    for x in session.batches(4, 8, count=6):
        same, flat, out = call(x, session.randn(4, 8))
        flat.add_(1)
        assert same is x or same.data_ptr() == x.data_ptr()
        assert flat.data_ptr() == x.data_ptr()
        yield [x, same, flat, out]


@ways(counts=steady(1, recordings=2, warmups=2))
def integers_that_change_are_part_of_the_signature(session):
    call = session.compile(lambda x, n: ((x * n).sin() + n).cos() * 2, dynamic=True)
    return [call(session.randn(4, 8), n) for n in (3, 5, 3, 5, 3, 5)]


@ways()
def gradient_mode_and_inference_mode(session):
    call, values = session.compile(long_enough), []
    for number in range(6):
        with torch.inference_mode(number % 2 == 1):
            values.append(call(session.randn(4, 8)).clone())
    return values


@ways(replays="none")
def conjugate_and_negative_bits(session):
    def fn(x, w):
        y = (x @ w).sin() * w.sum().conj()
        return y, y.conj(), x.conj(), torch._neg_view(y.real)

    call = session.compile(fn)
    for number in range(8):
        parts = session.randn(3, 4), session.randn(3, 4), session.randn(4, 2), session.randn(4, 2)
        x = torch.complex(*parts[:2]).conj().requires_grad_(number > 3)
        w = torch.complex(*parts[2:]).requires_grad_(number > 3)
        outputs = call(x, w)
        yield [o.resolve_conj().resolve_neg().detach().clone() for o in outputs]
        if number > 3:
            yield [g.resolve_conj() for g in torch.autograd.grad(outputs[0].abs().sum(), (x, w))]


@ways.everywhere
def test_inputs(way, program):
    program.check(way)
