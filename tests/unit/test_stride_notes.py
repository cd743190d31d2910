"""Layouts that later partitions keep as earlier ones returned them."""

import torch

from cgpass.resplit import StrideNotes


def orders(outputs):
    return [sorted(range(x.dim()), key=lambda d: -x.stride(d)) for x in outputs]


def matched(notes, noted, returned):
    """Layouts of what a function returns, after another one returned something else."""
    notes.noting(lambda _: noted)([])
    out = notes.matching(lambda _: returned)([])
    for ours, theirs in zip(out, returned, strict=True):
        assert torch.equal(ours, theirs)
    return orders(out)


def test_outputs_come_in_the_order_that_was_noted_last():
    notes, rows = StrideNotes(frozenset({0})), torch.arange(6.0).view(2, 3)
    columns = rows.t().contiguous().t()
    for noted, order in ((columns, [1, 0]), (columns, [1, 0]), (rows, [0, 1]), (columns, [1, 0])):
        for returned in (rows, columns, rows):
            assert matched(notes, [noted, rows], [returned, rows]) == [order, [0, 1]]


def test_outputs_in_the_order_noted_are_handed_on_whatever_their_sizes():
    notes, columns = StrideNotes(frozenset({0})), torch.randn(3, 2).t()
    for size in (3, 5, 3):
        fitting = torch.randn(size, 4).t()
        notes.noting(lambda _: [columns])([])
        assert notes.matching(lambda _, x=fitting: [x])([])[0] is fitting
