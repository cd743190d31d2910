"""Inputs that are parts of larger tensors, in functions that count from the beginning of their storage."""

import pytest
from torch import nn

from tests.usage.programs import assert_replays


class Strided(nn.Module):
    """Reads its input's storage at fixed places."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, x):
        window = x.as_strided((2, 3), (3, 1), self.offset)
        return (window.sin() + 1).cos() * 2


def called(make, parts, count=8, grad=False):
    """A program that calls a function on parts of new tensors."""

    def program(session):
        _, call = session.compiled(make)
        values = []
        for _ in range(count):
            whole = session.randn(24).requires_grad_(grad)
            out = call(*parts(whole))
            if grad:
                out.sum().backward()
                values.append(whole.grad)
            values += [out, whole.detach().clone()]
        return values

    return program


@pytest.mark.parametrize("offset", [2, 4, 16], ids=["inside", "between", "past the end"])
def test_as_strided_of_a_slice(setting, offset):
    counters = setting.compare(called(lambda: Strided(offset), lambda x: (x[2:14],)))
    assert_replays(counters)


def test_as_strided_of_a_slice_that_wants_a_gradient(setting):
    make = lambda: Strided(4)  # noqa: E731
    assert_replays(setting.compare(called(make, lambda x: (x[2:14],), grad=True)))


def test_slices_of_other_places(setting):
    """The same size at another offset, and in a larger storage: each is a signature of its own."""

    def program(session):
        _, call = session.compiled(lambda: Strided(4))
        values = []
        for number in range(18):
            begin, size = ((2, 24), (5, 24), (2, 40))[number % 3]
            values.append(call(session.randn(size)[begin : begin + 12]))
        return values

    assert_replays(setting.compare(program))


class WritesStrided(nn.Module):
    def forward(self, x):
        x.as_strided((3,), (2,), 5).mul_(-2)
        return (x.sin() + 1).cos() * 2


def test_a_strided_part_is_written(setting):
    counters = setting.compare(called(WritesStrided, lambda x: (x[2:14],)))
    assert_replays(counters)


class WritesOneOfTwo(nn.Module):
    def forward(self, x, y):
        x.mul_(2)
        return ((x + y).sin() + 1).cos()


def test_one_of_two_overlapping_slices_is_written(setting):
    """AOTAutograd makes one tensor of the two, and counts from the beginning of its storage."""

    def program(session):
        _, source = session.compiled(nn.Identity)
        _, call = session.compiled(WritesOneOfTwo)
        values = []
        for _ in range(8):
            part = source(session.randn(24) * 2)[2:]
            values += [call(part[:12], part[4:16]), part.clone()]
        return values

    assert setting.compare(program)["replays"] > 0


class WritesNeighbours(nn.Module):
    def forward(self, x, y):
        y.mul_(2)
        x.as_strided((4,), (1,), 8).add_(1)
        return ((x.sum() + y).sin() + 1).cos()


def test_neighbours_on_one_storage_are_both_written(setting):
    def program(session):
        _, call = session.compiled(WritesNeighbours)
        whole, values = session.randn(24), []
        for _ in range(8):
            values += [call(whole[8:20], whole[:8]), whole.clone()]
        return values

    assert_replays(setting.compare(program))


def test_offsets_that_never_repeat(setting, caplog):
    """Each is a signature of its own: said after a while, and right all along."""

    def program(session):
        _, call = session.compiled(lambda: Strided(4))
        whole = session.randn(400)
        return [call(whole[2 * n : 2 * n + 12]) for n in range(131)]

    setting.compare(program)
    assert "128 calls came that were never recorded" in caplog.text
