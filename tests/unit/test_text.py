"""The stable text of a graph."""

import operator

import torch
from expecttest import assert_expected_inline

from cgpass.compile.facts.text import graph_text, value_text
from tests.graphs import fake_cuda_graph, node_named

aten = torch.ops.aten


def test_one_line_a_node():
    def fn(x, w):
        y = torch.nn.functional.dropout(x @ w, 0.5)
        return y.to(torch.float16), torch.cat([x, x])

    assert_expected_inline(
        graph_text(fake_cuda_graph(fn, (2, 3), (3, 4))),
        """\
x_1: float32[2, 3]@cuda = placeholder
w_1: float32[3, 4]@cuda = placeholder
mm: float32[2, 4]@cuda = aten.mm.default(x_1, w_1)
native_dropout: (float32[2, 4]@cuda, bool[2, 4]@cuda) = aten.native_dropout.default(mm, 0.5, True)
getitem: float32[2, 4]@cuda = getitem(native_dropout, 0)
getitem_1: bool[2, 4]@cuda = getitem(native_dropout, 1)
_to_copy: float16[2, 4]@cuda = aten._to_copy.default(getitem, dtype=float16)
cat: float32[4, 3]@cuda = aten.cat.default([x_1, x_1])
return (_to_copy, cat)""",
    )


def test_nested_graphs_follow_indented():
    gm = fake_cuda_graph(lambda x: x.sin(), (3,))
    gm.captured_0 = fake_cuda_graph(lambda x: x.cos(), (3,))
    x = node_named(gm, "x_1")
    with gm.graph.inserting_after(x):
        call = gm.graph.call_module("captured_0", (x,))
    with gm.graph.inserting_after(call):
        gm.graph.call_function(operator.getitem, (call, 0))
    assert_expected_inline(
        graph_text(gm),
        """\
x_1: float32[3]@cuda = placeholder
captured_0 = captured_0(x_1)
getitem = getitem(captured_0, 0)
sin: float32[3]@cuda = aten.sin.default(x_1)
return sin
captured_0:
    x_1: float32[3]@cuda = placeholder
    cos: float32[3]@cuda = aten.cos.default(x_1)
    return cos""",
    )


def test_values_of_every_kind():
    found = [value_text(v) for v in (None, 3, 0.5, (torch.ones(2), None), torch.Generator())]
    assert found == ["None", "3", "0.5", "(float32[2]@cpu, None)", "Generator"]
