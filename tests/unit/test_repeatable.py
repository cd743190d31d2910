"""Graphs that may run once more than they are called, on copies of what they write."""

import dataclasses

import pytest
import torch

from cgpass.assembly import _is_repeatable
from cgpass.graph.inputs import input_infos
from tests.graphs import fake_cuda_graph


def writes(x, y):
    y.add_(x)
    return y * 2


def writes_beside(x, y):
    y.as_strided((2,), (3,)).add_(1)
    return x * 2


@torch.library.custom_op("repeatable::fill", mutates_args=("y",))
def fill(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)  # and who knows what else


def writes_by_a_custom_operator(x, y):
    torch.ops.repeatable.fill(x, y)
    return x * y


def says(x, y):
    torch.ops.aten._assert_async.msg(x.sum() > 0, "positive")
    return x * y


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (torch.add, True),
        (writes, True),
        (writes_beside, False),
        (writes_by_a_custom_operator, False),
        (says, False),
    ],
)
def test_what_may_run_once_more(fn, expected):
    gm = fake_cuda_graph(fn, (3,), (3,))
    infos = input_infos(gm, static=())
    assert _is_repeatable(gm, infos) is expected
    read = tuple(dataclasses.replace(info, mutated=False) for info in infos)
    assert _is_repeatable(gm, read) is (expected or fn is writes_beside)
