"""Where values of a partitioned graph lie."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass.compile.facts.input_info import InputKind
from cgpass.compile.facts.inputs import value_kinds

COPIED, STATIC = InputKind.COPIED, InputKind.STATIC


def graph(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def views(a, b):
    return a.view(4).sin(), b.view(2, 2).cos()


def test_views_lie_where_what_they_view_lies():
    gm = graph(views, torch.zeros(2, 2), torch.zeros(4))
    a, b = (node.name for node in gm.graph.find_nodes(op="placeholder"))
    found = value_kinds(gm, {a: STATIC})
    assert (found[a], found["view"], found[b], found["view_1"]) == (STATIC, STATIC, COPIED, COPIED)


def test_a_copy_shares_nothing_with_what_it_shared_memory_with():
    flat = torch.zeros(8)
    for copy in (0, 1):
        gm = graph(views, flat[:4].view(2, 2), flat[4:])
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        found = value_kinds(gm, dict.fromkeys(names, STATIC), copies={names[copy]})
        other = names[1 - copy]
        of_view = ("view", "view_1")
        assert (found[names[copy]], found[of_view[copy]]) == (COPIED, COPIED)
        assert (found[other], found[of_view[1 - copy]]) == (STATIC, STATIC)
