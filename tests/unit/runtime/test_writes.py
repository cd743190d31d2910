"""Writes that operators declare, and the inputs that they concern."""

import pytest
import torch

from cgpass.runtime.writes import Watched, written_by

X = torch.ones(4)


def found(fn, *inputs):
    with Watched(inputs) as watched:
        fn(*inputs)
    return watched.said


@pytest.mark.parametrize(
    ("fn", "written"),
    [
        (lambda a, b: a.add_(b), {0}),
        (lambda a, b: torch.add(a, b, out=b), {1}),
        (lambda a, b: torch._foreach_mul_([b, a], 1), {0, 1}),
        (lambda a, b: a.data.t()[2:].zero_(), {0}),
        (lambda a, b: a + b, set()),
        (lambda a, b: (a * 1).add_(b), set()),
        (lambda a, b: torch.func.vmap(lambda x: x.mul_(1))(b), {1}),
    ],
)
def test_written_inputs_are_found_by_schema(fn, written):
    assert found(fn, X.clone(), X.clone()) == written


def test_only_the_parts_of_a_storage_that_are_written():
    base = torch.zeros(3, 4)
    assert found(lambda *rows: rows[1].fill_(0), *base, base, base[:, 0]) == {1, 3, 4}


def test_old_collectives_write_all_but_their_inputs():
    class Schema:
        name = "c10d::allgather_"
        arguments = ()

    class Operator:
        _schema = Schema

    into, source = [torch.zeros(2)], [torch.ones(2)]
    named = {"output_tensors": [into], "input_tensors": source, "timeout": -1}
    (written,) = written_by(Operator, (), named)
    assert written is into[0]


def test_what_has_no_memory_is_written_by_nothing():
    empty, meta = torch.empty(0), torch.empty(2, device="meta")
    assert found(lambda e, m: (e.zero_(), m.zero_()), empty, meta) == set()
    assert found(lambda x, n: x.to_sparse().mul_(n), X, 2) == set()


def test_what_is_compiled_inside_stays_compiled():
    calls = []

    def backend(gm, inputs):
        def run(*args):
            calls.append(len(args))
            return gm(*args)

        return run

    compiled = torch.compile(lambda a, b: a.add_(b), backend=backend)
    assert found(compiled, X.clone(), X.clone()) == {0}
    assert found(compiled, X.clone(), X.clone()) == {0}
    assert len(calls) == 2
    torch.compiler.reset()


def used(fn, *inputs):
    with Watched(inputs) as watched:
        out = fn(*inputs)
    return watched, out


def test_what_operators_use_that_is_neither_an_input_nor_made_is_held():
    weight, table = torch.ones(4), torch.ones(2, 4)
    watched, _ = used(
        lambda a: torch.cat([(a * 2 + weight)[None], table[1:]]) + torch.tensor(1.0), X
    )
    assert watched.outside.keys() == {t.untyped_storage().data_ptr() for t in (weight, table)}
    assert used(lambda a: a[1:].add_(1) * a[:3], X.clone())[0].outside == {}


def test_what_no_operator_saw_is_unknown():
    weight = torch.ones(4)
    watched, (made, seen, given) = used(lambda a: (a + 1, weight, a), X)
    assert [bool(watched.unknown(t)) for t in (made, seen, given)] == [False, True, False]
    assert not watched.unknown(3)
