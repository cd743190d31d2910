"""Random operators of Inductor's among others: which runs of nodes get kernels."""

import torch
import torch._inductor.inductor_prims
from expecttest import assert_expected_inline
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.inductor_random import InductorRandom
from tests.graphs import node_named

CPU = torch.device("cpu")
prims = torch.ops.prims


def drops(x):
    seeds = prims.inductor_seeds(2, CPU)
    seed = prims.inductor_lookup_seed(seeds, 1)
    x = x * (prims.inductor_random(x.shape, seed, "rand") > 0.5)
    values, _ = x.sort()
    return values + prims.inductor_randint(0, 5, x.shape, seed)


def run(gm):
    return run_passes((InductorRandom(),), gm, PassContext(CPU, "test", "forward")).gm


def test_runs_of_random_operators_are_tagged():
    gm = run(make_fx(drops, tracing_mode="fake")(torch.ones(3)))
    assert_expected_inline(
        graph_text(gm),
        """\
x_1: float32[3]@cpu = placeholder
inductor_seeds: int64[2]@cpu = prims.inductor_seeds.default(2, cpu)  # captured_0
inductor_lookup_seed: int64[]@cpu = prims.inductor_lookup_seed.default(inductor_seeds, 1)  # captured_0
inductor_random: float32[3]@cpu = prims.inductor_random.default([3], inductor_lookup_seed, rand)  # captured_0
gt: bool[3]@cpu = aten.gt.Scalar(inductor_random, 0.5)  # eager_1
mul: float32[3]@cpu = aten.mul.Tensor(x_1, gt)  # eager_1
sort: (float32[3]@cpu, int64[3]@cpu) = aten.sort.default(mul)  # eager_1
getitem: float32[3]@cpu = getitem(sort, 0)  # eager_1
getitem_1: int64[3]@cpu = getitem(sort, 1)  # eager_1
inductor_randint: int64[3]@cpu = prims.inductor_randint.default(0, 5, [3], inductor_lookup_seed)  # captured_2
add: float32[3]@cpu = aten.add.Tensor(getitem, inductor_randint)  # eager_3
return add""",
    )


def test_twice_is_once():
    gm = run(make_fx(drops, tracing_mode="fake")(torch.ones(3)))
    before = graph_text(gm)
    assert graph_text(run(gm)) == before


def test_parts_of_a_result_stay_with_it():
    gm = make_fx(drops, tracing_mode="fake")(torch.ones(3))
    late = node_named(gm, "getitem_1")
    node_named(gm, "inductor_randint").append(late)
    run(gm)
    assert late.prev is node_named(gm, "getitem")


def test_random_operators_of_a_nested_graph_count():
    """The whole operator that holds them is compiled."""
    body = make_fx(drops, tracing_mode="fake")(torch.ones(3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    inner = graph.get_attr("body")
    call = graph.call_function(torch.ops.higher_order.cond, (x, inner, inner, (x,)))
    graph.output((call,))
    x.meta["val"] = call.meta["val"] = torch.ones(3)
    gm = run(fx.GraphModule({"body": body}, graph))
    assert str(node_named(gm, call.name).meta["cgpass"]) == "captured_0"
