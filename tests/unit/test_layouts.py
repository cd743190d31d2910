"""Layouts that graphs were compiled for: kept as earlier calls returned them, or as they were traced."""

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass import layouts
from cgpass.layouts import StrideNotes, inputs_as_traced, laid_out_otherwise, outputs_as_traced
from cgpass.telemetry import new_call_stats


def split(notes, noted, returned, sizes=()):
    """What a function returns, after another one returned something else."""
    notes.noting(lambda _: noted)(list(sizes))
    out = notes.matching(lambda _: returned)(list(sizes))
    for ours, theirs in zip(out, returned, strict=True):
        assert torch.equal(ours, theirs)
    return out


def test_outputs_come_with_the_strides_that_were_noted_last():
    notes, rows = StrideNotes(frozenset({0})), torch.arange(6.0).view(2, 3)
    columns, gaps = rows.t().contiguous().t(), torch.zeros(2, 6)[:, :3].copy_(rows)
    noted = (columns, columns, gaps, rows, gaps, columns)
    for layout in noted:
        for returned in (rows, columns, gaps, rows):
            first, second = split(notes, [layout, rows], [returned, columns])
            assert first.stride() == layout.stride()
            assert second is columns


def test_outputs_that_lie_as_noted_are_handed_on():
    notes, one = StrideNotes(frozenset({0, 1})), torch.zeros(1, 4)
    padded = torch.as_strided(one, (1, 4), (100, 1))
    for returned in ([one, 3], [padded, None], [one, 3]):
        notes.noting(lambda _: [one, 3])([])
        out = notes.matching(lambda _, returned=returned: returned)([])
        assert out[0] is returned[0], "no element is reached by the stride of a dimension of size 1"


def test_an_expanded_output_is_expanded_again():
    notes, expanded = StrideNotes(frozenset({0})), torch.arange(3.0).expand(2, 3)
    (out,) = split(notes, [expanded], [expanded.contiguous()])
    assert out.stride() == (0, 1)


def test_sizes_of_which_nothing_is_known_run_as_a_whole_once():
    notes, whole = StrideNotes(frozenset({0}), sizes=(0,)), []
    notes.stats = new_call_stats()

    def graph(args):
        whole.append(args[0])
        return [torch.zeros(args[0], 6)[:, :3]]

    notes.noting(graph)([2])
    parts = notes.matching(lambda args: [torch.zeros(args[0], 3)])
    for size in (2, 5, 5, 2, 7, 5, 7):
        (out,) = parts([size])
        assert (out.shape, out.stride()) == ((size, 3), (6, 1))
    assert whole == [2, 5, 7]
    assert (notes.stats.calls, notes.stats.warmups) == (2, 2)


def test_sizes_that_are_noted_again_push_out_no_others(monkeypatch):
    monkeypatch.setattr(layouts, "_SIZES_KEPT", 3)
    notes, whole = StrideNotes(frozenset({0}), sizes=(0,)), []
    notes.stats = new_call_stats()

    def graph(args):
        whole.append(args[0])
        return [torch.zeros(args[0], 6)[:, :3]]

    noting = notes.noting(graph)
    for size in (1, 2, 3, 2):
        noting([size])
    parts = notes.matching(lambda args: [torch.zeros(args[0], 3)])
    for size in (1, 2, 3, 4, 1):
        parts([size])
    assert whole == [1, 2, 3, 2, 4, 1], "4 came in the place of 1, the oldest"


def test_conjugated_tensors_are_laid_out_as_what_they_stand_for():
    with FakeTensorMode() as mode:
        fake = torch.empty(2, 3, dtype=torch.complex64)
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.empty(2, 3, dtype=torch.complex64))
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = fake
    seen = []
    run = inputs_as_traced(gm, [0])(seen.extend)
    value = torch.complex(torch.randn(3, 2), torch.randn(3, 2)).t().conj()
    run([value])
    assert seen[0].stride() == (3, 1)
    assert torch.equal(seen[0], value)
    del mode


def test_what_looks_dense_for_some_sizes_may_not_be_for_others():
    notes = StrideNotes(frozenset({0}), sizes=(0,))
    notes.noting(lambda args: [torch.zeros(2, args[0])[:, :3]])([3])
    parts = notes.matching(lambda args: [torch.zeros(2, 3)])
    for width in (3, 5, 4, 5, 3):
        assert parts([width])[0].stride() == (width, 1)


def test_the_same_outputs_may_be_right_for_some_sizes_alone():
    notes = StrideNotes(frozenset({0}), sizes=(0,))
    notes.noting(lambda args: [torch.zeros(2, args[0])[:, :3]])([6])
    parts = notes.matching(lambda args: [torch.zeros(2, 6)[:, :3]])
    for width in (6, 9, 6, 9, 6):
        assert parts([width])[0].stride() == (width, 1)


def test_layouts_of_the_oldest_sizes_are_forgotten(monkeypatch):
    monkeypatch.setattr(layouts, "_SIZES_KEPT", 2)
    notes, whole = StrideNotes(frozenset({0}), sizes=(0,)), []

    def graph(args):
        whole.append(args[0])
        return [torch.zeros(2, args[0])]

    notes.noting(graph)([1])
    parts = notes.matching(lambda args: [torch.zeros(2, args[0])])
    for size in (1, 2, 1, 3, 2, 3, 1):
        parts([size])
    assert whole == [1, 2, 3, 1]


def test_before_anything_was_noted_calls_run_as_a_whole():
    notes, gaps = StrideNotes(frozenset({0})), torch.zeros(2, 6)[:, :3]
    notes.noting(lambda _: [gaps])
    parts = notes.matching(lambda _: [torch.zeros(2, 3)])
    assert parts([])[0] is gaps
    assert parts([])[0].stride() == gaps.stride()


def test_sizes_that_depend_on_data_keep_their_order():
    notes = StrideNotes(frozenset({0}))
    notes.noting(lambda _: [torch.zeros(3, 2).t()])([])
    (out,) = notes.matching(lambda _: [torch.zeros(5, 2)])([])
    assert out.stride() == (1, 5)
    notes = StrideNotes(frozenset({0}))
    gaps = torch.zeros(2, 6)[:, :3]
    notes.noting(lambda _: [gaps])([])
    other = torch.zeros(4, 6)[:, :3]
    assert notes.matching(lambda _: [other])([])[0] is other
    (out,) = notes.matching(lambda _: [torch.zeros(3, 4).t()])([])
    assert out.stride() == (3, 1)


def traced(fn, *inputs, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*inputs)


def test_outputs_of_a_partition_lie_as_it_was_traced():
    gm = traced(lambda x: (x[:, ::2], x + 1, 3), torch.zeros(4, 6))
    run = outputs_as_traced(gm)(lambda args: [args[0][:, ::2].contiguous(), args[0].t().t() + 1, 3])
    x = torch.arange(24.0).view(4, 6)
    for _ in range(2):
        first, second, third = run([x])
        assert first.stride() == (6, 2)
        assert torch.equal(first, x[:, ::2])
        assert (second.stride(), third) == ((6, 1), 3)


def test_strides_follow_the_sizes_of_a_call():
    gm = traced(lambda x: (x[:, 1:],), torch.zeros(4, 6), mode="symbolic")
    run = outputs_as_traced(gm)(lambda args: [args[0][:, 1:].contiguous()])
    for columns in (6, 9, 6, 3):
        x = torch.randn(5, columns)
        (out,) = run([x])
        assert out.stride() == (columns, 1)
        assert torch.equal(out, x[:, 1:])


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
    strides = []

    def graph(args):
        strides.append([x.stride() for x in args])
        return [args[0] + args[1]]

    run = inputs_as_traced(gm, [1])(graph)
    rows, columns = torch.randn(4, 6), torch.randn(6, 4).t()
    for _ in range(2):
        assert torch.equal(run([columns, columns])[0], columns * 2)
        assert torch.equal(run([rows, rows])[0], rows * 2)
    assert strides == [[(1, 4), (6, 1)], [(6, 1), (6, 1)]] * 2


def test_inputs_that_come_otherwise_than_traced_are_found():
    gm = traced(lambda x, y, z: (x + y,), torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(()))
    with FakeTensorMode():
        given = [torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(())]
    assert laid_out_otherwise(gm, given) == [1]
