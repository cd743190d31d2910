"""Layouts that graphs were compiled for: as they were traced."""

import torch
from torch._subclasses import FakeTensorMode

from cgpass.compile.layouts import inputs_as_traced, laid_out_otherwise, outputs_as_traced
from tests.graphs import traced


def test_conjugated_tensors_are_laid_out_as_what_they_stand_for():
    with FakeTensorMode() as mode:
        fake = torch.empty(2, 3, dtype=torch.complex64)
    gm = traced(lambda x: x + 1, torch.empty(2, 3, dtype=torch.complex64))
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = fake
    value = torch.complex(torch.randn(3, 2), torch.randn(3, 2)).t().conj()
    seen = inputs_as_traced(gm, [0])([value])
    assert seen[0].stride() == (3, 1)
    assert torch.equal(seen[0], value)
    del mode


def test_outputs_of_a_partition_lie_as_it_was_traced():
    gm = traced(lambda x: (x[:, ::2], x + 1, 3), torch.zeros(4, 6))
    run = outputs_as_traced(gm)(lambda args: [args[0][:, ::2].contiguous(), args[0].t().t() + 1, 3])
    x = torch.arange(24.0).view(4, 6)
    for _ in range(2):
        first, second, third = run([x])
        assert first.stride() == (6, 2)
        assert torch.equal(first, x[:, ::2])
        assert (second.stride(), third) == ((6, 1), 3)


def test_the_same_geometry_may_be_right_for_one_size_and_wrong_for_another():
    gm = traced(
        lambda x, y: (x.new_zeros(2, y.shape[0])[:, :2],),
        torch.zeros(2),
        torch.zeros(5),
        mode="symbolic",
    )
    run = outputs_as_traced(gm)(lambda args: [torch.zeros(2, 5)[:, :2]])
    strides = [run([torch.zeros(2), torch.zeros(n)])[0].stride() for n in (5, 7, 5, 5, 7)]
    assert strides == [(5, 1), (7, 1), (5, 1), (5, 1), (7, 1)]


def test_inputs_of_a_graph_in_parts_lie_as_it_was_traced():
    gm = traced(lambda x, y: (x + y,), torch.zeros(4, 6), torch.zeros(4, 6))
    as_traced = inputs_as_traced(gm, [1])
    rows, columns = torch.randn(4, 6), torch.randn(6, 4).t()
    for value, stride in ((columns, (1, 4)), (rows, (6, 1))) * 2:
        found = as_traced([value, value])
        assert [each.stride() for each in found] == [stride, (6, 1)]
        assert all(torch.equal(each, value) for each in found)


def test_inputs_that_come_otherwise_than_traced_are_found():
    gm = traced(lambda x, y, z: (x + y,), torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(()))
    with FakeTensorMode():
        given = [torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(())]
    assert laid_out_otherwise(gm, given) == [1]
