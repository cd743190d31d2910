"""Outlined graphs: parts with explicit inputs, equal in what they compute."""

import itertools

import torch
from expecttest import assert_expected_inline
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import PartitionTag, get_tag
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.outline import outline
from cgpass.compile.passes.partition import Partition
from cgpass.compile.plan import build_plan
from cgpass.runtime.executor import Executor
from tests.graphs import CUDA, calls, fake_cuda_graph, node_named, sync_between, traced

CPU = torch.device("cpu")
aten = torch.ops.aten


def cut(gm, device=CUDA, unsafe=(), minimum=1):
    passes = [Partition(frozenset(unsafe), minimum)]
    run_passes(passes, gm, PassContext(device, "graph", "forward"))
    return outline(gm)


def run(gm, parts, args):
    runs = {part.name: lambda values, part=part: part.gm(*values) for part in parts}
    return Executor(build_plan(gm, parts, runs, frozenset()), None)([*args])


def inputs(module):
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def test_parts_take_and_return_what_is_used():
    gm = fake_cuda_graph(sync_between, (4, 4), (4, 4))
    parts = cut(gm)
    assert_expected_inline(
        "\n".join(map(str, parts)),
        """\
captured_0(x_1, w_1):
    x_1: float32[4, 4]@cuda = placeholder
    w_1: float32[4, 4]@cuda = placeholder
    mm: float32[4, 4]@cuda = aten.mm.default(x_1, w_1)
    max_1: (float32[4]@cuda, int64[4]@cuda) = aten.max.dim(mm, 1)
    getitem: float32[4]@cuda = getitem(max_1, 0)
    getitem_1: int64[4]@cuda = getitem(max_1, 1)
    mul: float32[4, 4]@cuda = aten.mul.Tensor(mm, 2)
    relu: float32[4, 4]@cuda = aten.relu.default(mul)
    return (getitem, getitem_1, relu)
eager_1(getitem):
    getitem: float32[4]@cuda = placeholder
    nonzero: int64[u0, 1]@cuda = aten.nonzero.default(getitem)
    return (nonzero,)""",
    )
    names = [[node.name for node in part.outputs] for part in parts]
    assert names == [["getitem", "getitem_1", "relu"], ["nonzero"]]


def test_names_and_meta_stay():
    gm = fake_cuda_graph(sync_between, (4, 4), (4, 4))
    mm = calls(gm, aten.mm.default)[0]
    mm.stack_trace = "a trace"
    mm.meta |= {"recompute": 1, "custom": {"region": "a"}, "nn_module_stack": {"m": ("m", "M")}}
    node_named(gm, "x_1").meta["desc"] = "the input"
    captured, _ = cut(gm)
    inner = calls(captured.gm, aten.mm.default)[0]
    assert inner.name == "mm"
    for key in ("val", "stack_trace", "recompute", "custom", "nn_module_stack"):
        assert inner.meta[key] is mm.meta[key]
    assert node_named(captured.gm, "x_1").meta["desc"] == "the input"
    assert captured.tag == PartitionTag(0, captured=True)


def test_attributes_are_in_every_part_that_uses_them():
    gm = traced(lambda x: ((x.relu().exp() + 1) * 2,), torch.ones(3))
    gm.register_parameter("scale", torch.nn.Parameter(torch.full((3,), 5.0)))
    with gm.graph.inserting_before(calls(gm, aten.relu.default)[0]):
        scale = gm.graph.get_attr("scale")
    for target in (aten.add.Tensor, aten.mul.Tensor):
        calls(gm, target)[0].update_arg(1, scale)
    gm.recompile()
    parts = cut(gm, CPU, unsafe=["aten::add"])
    assert parts[1].gm.scale is parts[2].gm.scale is gm.scale
    assert torch.equal(*run(gm, parts, [torch.ones(3)]), *gm(torch.ones(3)))


def test_what_an_operator_wrote_is_known_by_the_input():
    parts = cut(fake_cuda_graph(lambda x: (torch.nonzero(x.add_(1)),), (4,)))
    assert [inputs(part.gm) for part in parts] == [["x_1"], ["x_1"]]


UNARY = (torch.relu, torch.sin, torch.neg, torch.Tensor.t, lambda x: x.reshape(2, 8).reshape(4, 4))
BINARY = (torch.add, torch.mul, torch.mm, torch.maximum)
OPS = (
    *("relu", "sin", "neg", "t", "view", "add", "mul", "mm", "maximum", "max", "add_", "bernoulli"),
    *("slice", "copy_", "normal_"),
)
logged = []
"""Inputs of the operator that logs."""


@torch.library.custom_op("test_outline::log", mutates_args=())
def log(x: torch.Tensor) -> None:
    logged.append(x.clone())


@torch.library.custom_op("test_outline::scale", mutates_args=("x",))
def scale(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(0.5).add_(y)


for each in (log, scale):
    each.register_fake(lambda *args: None)
CUSTOM = ("test_outline::log", "test_outline::scale")
KINDS = ("unary", "binary", "binary", "max", "write", "random", "part", "normal", "log", "custom")


@st.composite
def programs(draw):
    """Steps of (kind, function, operands); operands count from the first input."""
    steps = []
    for have in range(2, 2 + draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(KINDS))
        number = draw(st.integers(0, 4 if kind == "unary" else 3))
        steps.append((kind, number, draw(st.tuples(*[st.integers(0, have - 1)] * 2))))
    unsafe = draw(st.sets(st.sampled_from([*(f"aten::{op}" for op in OPS), *CUSTOM])))
    return steps, frozenset(unsafe), draw(st.sampled_from([1, 1, 3]))


def run_program(steps, *made):
    made = list(made)
    for kind, number, (a, b) in steps:
        if kind == "unary":
            made.append(UNARY[number](made[a]))
        elif kind == "binary":
            made.append(BINARY[number](made[a], made[b]))
        elif kind == "max":
            top, where = made[a].max(1, keepdim=True)
            made.append((top + where) * made[b])
        elif kind == "write":
            made.append(made[a].add_(1.5))
        elif kind == "part":
            made[a][1:3].copy_(made[b][:2].sin())
            made.append(made[a])
        elif kind == "normal":
            made.append(made[a].t().normal_())
        elif kind == "log":
            log(made[a])
            made.append(made[b])
        elif kind == "custom":
            scale(made[a][:2], made[b][1:3].cos())
            made.append(made[a])
        else:
            made.append(torch.bernoulli(made[a], 0.5))
    return made[-4:]


def all_of(fn, args):
    """Outputs of a graph, its inputs afterwards, side effects, and the generator's state."""
    logged.clear()
    torch.manual_seed(1)
    inputs = [arg.clone() for arg in args]
    return [*fn(inputs), *inputs, *logged, torch.get_rng_state()]


# Tracing is slow, so failing programs are not shrunk.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(programs())
def test_random_graphs_execute_equal(program):
    steps, unsafe, minimum = program
    torch.manual_seed(0)
    args = torch.rand(4, 4), torch.rand(4, 4)
    gm = traced(lambda *xs: run_program(steps, *xs), *(arg.clone() for arg in args))
    expected = all_of(lambda inputs: gm(*inputs), args)
    before = [node for node in gm.graph.nodes if node.op == "call_function"]
    parts = cut(gm, CPU, unsafe, minimum)
    after = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert sorted(map(str, before)) == sorted(map(str, after))
    cuts = list(dict.fromkeys(map(get_tag, after)))
    assert [tag.index for tag in cuts] == [*range(len(cuts))]
    assert all(a.captured != b.captured for a, b in itertools.pairwise(cuts))
    assert [n for n in before if values.is_random(n)] == [n for n in after if values.is_random(n)]
    found = zip(expected, all_of(lambda inputs: run(gm, parts, inputs), args), strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in found)
