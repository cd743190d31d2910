"""Wrapped random operators have values."""

import operator

import torch
from torch import fx
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode

from cgpass.compile.facts import values
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.rng_values import RngValues

CPU = torch.device("cpu")
aten = torch.ops.aten


def graph():
    """Both halves of a recomputed random operator, as the split leaves them."""
    made = fx.Graph()
    x = made.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3, 4)
        state_value = torch.empty(16, dtype=torch.uint8)
    saved = made.call_function(
        rng_prims.run_and_save_rng_state, (aten.rand_like.default, x), {"pin_memory": False}
    )
    state, drawn = (made.call_function(operator.getitem, (saved, i)) for i in (0, 1))
    state.meta["val"], drawn.meta["val"] = state_value, x.meta["val"]
    again = made.call_function(
        rng_prims.run_with_rng_state, (state, aten.rand_like.default, x), {"pin_memory": False}
    )
    made.output((drawn, again))
    return fx.GraphModule({}, made), saved, again


def run(gm):
    return run_passes((RngValues(),), gm, PassContext(CPU, "test", "forward"))


def test_values_are_those_of_the_wrapped_operator():
    gm, saved, again = graph()
    before = torch.get_rng_state()
    run(gm)
    assert torch.equal(torch.get_rng_state(), before)
    assert [tuple(t.shape) for t in values.tensors(saved)] == [(16,), (3, 4)]
    assert again.meta["val"].shape == (3, 4)
    assert not values.storage_keys(again) & values.storage_keys(
        gm.graph.find_nodes(op="placeholder")[0]
    )


def test_values_that_are_there_stay():
    gm, _, again = graph()
    run(gm)
    value = again.meta["val"]
    run(gm)
    assert again.meta["val"] is value


def test_an_unread_half_has_no_value():
    gm, saved, again = graph()
    state = next(user for user in saved.users if user.args[1] == 0)
    again.args = (gm.graph.find_nodes(op="placeholder")[0], *again.args[1:])
    gm.graph.erase_node(state)
    run(gm)
    assert [tuple(t.shape) for t in values.tensors(saved)] == [(3, 4)]
