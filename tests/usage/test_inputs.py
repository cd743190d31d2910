"""Inputs: written ones, the same one twice, views of each other, other kinds than float tensors."""

import torch

from tests.usage.programs import Counter, assert_steady


def mutated_input(session):
    """A buffer and an input are changed by every call."""
    module, call = session.compiled(Counter)
    state = session.tensor([1.0, 2.0, 3.0])
    outs = [call(batch, state) for batch in session.batches(4, 8)]
    return [*outs, module.seen, state]


def test_a_mutated_input_is_written_back(setting):
    assert_steady(setting.compare(mutated_input), captured=1)


def test_a_mutated_input_is_written_back_through_inductor(setting):
    assert_steady(setting.compare(mutated_input, compiler="inductor"), captured=1)


def test_another_tensor_mutated_by_each_call(setting):
    def program(session):
        _, call = session.compiled(Counter)
        states = [session.randn(3) for _ in range(6)]
        outs = [call(batch, s) for batch, s in zip(session.batches(4, 8), states, strict=False)]
        return [*outs, *states]

    assert_steady(setting.compare(program), captured=1)


def two_inputs(session):
    """Two inputs of one shape and other values."""

    def fn(a, b):
        return (a.sin() * 2 - b.cos()) * (a + b)

    call = session.compile(fn)
    return [call(session.randn(4, 8), session.randn(4, 8)) for _ in range(6)]


def test_two_inputs_of_one_shape(setting):
    assert_steady(setting.compare(two_inputs), captured=1)


def test_the_same_tensor_twice_and_two_tensors_alternate(setting):
    def program(session):
        def fn(a, b):
            return (a.sin() * 2 - b.cos()) * (a + b)

        call = session.compile(fn)
        values = []
        for number in range(8):
            a = session.randn(4, 8)
            values.append(call(a, a if number % 2 else session.randn(4, 8)))
        return values

    assert_steady(setting.compare(program), captured=2)


def test_the_same_tensor_twice_and_mutated(setting):
    def program(session):
        def fn(a, b):
            a.add_(1)
            return (b.sin() * 2).cos() + a

        call = session.compile(fn)
        values = []
        for _ in range(6):
            a = session.randn(4, 8)
            values += [call(a, a), a]
        return values

    assert_steady(setting.compare(program), captured=1)


def test_a_mutated_view_changes_its_base(setting):
    def program(session):
        def fn(base, part):
            part.mul_(2).add_(1)
            return (base.sin() + 1).cos()

        call = session.compile(fn)
        values = []
        for _ in range(6):
            base = session.randn(4, 8)
            values += [call(base, base[1:3]), base]
        return values

    counters = setting.compare(program)
    assert counters["replays"] > 0, counters


def test_strided_expanded_and_integer_inputs(setting):
    def program(session):
        def fn(transposed, expanded, index, flag):
            x = transposed.sin() + expanded
            return torch.where(flag, x[index], -x[index]) * 2

        call = session.compile(fn)
        values = []
        for number in range(6):
            values.append(
                call(
                    session.randn(8, 4).t(),
                    session.randn(1, 8).expand(4, 8),
                    session.tensor([number % 4, 1, 2]),
                    session.tensor([True, number % 2 == 0, False])[:, None],
                )
            )
        return values

    assert_steady(setting.compare(program), captured=1)


def test_an_output_that_is_an_input_or_a_view_of_one(setting):
    def program(session):
        def fn(x, y):
            x.add_(1)
            return x, x.view(-1), (x * y).sin().cos()

        call = session.compile(fn)
        values = []
        for _ in range(6):
            x = session.randn(4, 8)
            same, flat, out = call(x, session.randn(4, 8))
            flat.add_(1)
            assert same is x or same.data_ptr() == x.data_ptr()
            assert flat.data_ptr() == x.data_ptr()
            values += [x, same, flat, out]
        return values

    assert_steady(setting.compare(program), captured=1)


def test_integers_that_change_are_part_of_the_signature(setting):
    def program(session):
        def fn(x, n):
            return ((x * n).sin() + n).cos() * 2

        call = session.compile(fn, dynamic=True)
        return [call(session.randn(4, 8), n) for n in (3, 5, 3, 5, 3, 5)]

    assert_steady(setting.compare(program), captured=1, recordings=2, warmups=2)


def test_gradient_mode_and_inference_mode(setting):
    def program(session):
        def fn(x):
            return (x.sin() + 1).cos().exp()

        call = session.compile(fn)
        values = []
        for number in range(6):
            with torch.inference_mode(number % 2 == 1):
                values.append(call(session.randn(4, 8)).clone())
        return values

    counters = setting.compare(program)
    assert counters["plain_calls"] == 0, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0, counters
