"""Kinds of inputs, found from a graph's placeholders."""

import torch

from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.inputs import input_infos, seed_positions, value_kinds
from tests.graphs import dynamic, fake_cuda_graph, node_named, traced


def kinds(gm, **known):
    return [info.kind for info in input_infos(gm, known)]


def test_tensors_are_what_is_known_and_other_values_go_by_their_type():
    gm = fake_cuda_graph(lambda *args: args[0] + args[1], *[dynamic(3)] * 3, *[(1,)] * 3)
    size, generator, other = gm.graph.find_nodes(op="placeholder")[3:]
    size.meta["val"] = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    generator.meta["val"], other.meta["val"] = torch.Generator(), object()
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert kinds(gm, **{names[0]: InputKind.STATIC, names[1]: InputKind.POOLED}) == [
        *(InputKind.STATIC, InputKind.POOLED, InputKind.COPIED),
        *(InputKind.SYMINT, InputKind.OPAQUE, InputKind.OPAQUE),
    ]


def test_mutated_inputs_are_found_through_views():
    def fn(x, y):
        x.view(-1)[0].fill_(1.0)
        return x + y

    gm = fake_cuda_graph(fn, (3,), (3,))
    assert [info.mutated for info in input_infos(gm)] == [True, False]


def test_sizes_that_no_integer_tells():
    gm = fake_cuda_graph(lambda a, x, m, n: (a + 1, x.sin()), (5,), dynamic(3, 5), (1,), (1,))

    def resized():
        return [info.is_resized for info in input_infos(gm)]

    sizes = node_named(gm, "x_1").meta["val"].shape
    assert resized() == [False, True, False, False]
    node_named(gm, "m_1").meta["val"] = sizes[0]
    assert resized() == [False, True, False, False]
    node_named(gm, "n_1").meta["val"] = sizes[1]
    assert resized() == [False, False, False, False]


def test_inputs_read_by_storage_are_found_through_views():
    def fn(x, y, z):
        return x.view(-1).as_strided((2,), (1,), 3), y.as_strided_scatter(z, (2,), (1,), 1)

    gm = fake_cuda_graph(fn, (2, 3), (6,), (2,))
    assert [info.whole_storage for info in input_infos(gm)] == [True, True, False]


def test_seeds_of_attention_are_found():
    def fn(q, seed, offset):
        out = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.5)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            q, q, q, q, None, out[0], out[1], seed, offset, 0.5, [True, True, True, False]
        )
        return grads[0]

    gm = fake_cuda_graph(fn, (1, 2, 4, 8), (), ())
    assert [info.is_seed for info in input_infos(gm)] == [False, True, True]
    assert seed_positions(gm) == (1, 2)


COPIED, STATIC = InputKind.COPIED, InputKind.STATIC


def views(a, b):
    return a.view(4).sin(), b.view(2, 2).cos()


def test_views_lie_where_what_they_view_lies():
    gm = traced(views, torch.zeros(2, 2), torch.zeros(4))
    a, b = (node.name for node in gm.graph.find_nodes(op="placeholder"))
    found = value_kinds(gm, {a: STATIC})
    assert (found[a], found["view"], found[b], found["view_1"]) == (STATIC, STATIC, COPIED, COPIED)


def test_a_copy_shares_nothing_with_what_it_shared_memory_with():
    flat = torch.zeros(8)
    for copy in (0, 1):
        gm = traced(views, flat[:4].view(2, 2), flat[4:])
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        found = value_kinds(gm, {**dict.fromkeys(names, STATIC), names[copy]: COPIED})
        other = names[1 - copy]
        of_view = ("view", "view_1")
        assert (found[names[copy]], found[of_view[copy]]) == (COPIED, COPIED)
        assert (found[other], found[of_view[1 - copy]]) == (STATIC, STATIC)
