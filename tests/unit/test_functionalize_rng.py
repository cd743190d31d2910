"""Random operators in both graphs of a split, on fake CUDA tensors."""

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass.compile.facts.rng_pairs import PAIR, pair_random_ops, require_drawn_once
from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes import rng_passes
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.functionalize_rng import RngPairs
from cgpass.compile.passes.split_joint import split_joint
from cgpass.errors import CheckpointError, PassError
from tests.graphs import CUDA, calls, cpu, fake_cuda_graph, joint_graph

aten = torch.ops.aten
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def checkpointed(fn):
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


def split(fn, *specs):
    """Forward and backward graph with their pairs marked."""
    joint = joint_graph(fn, *specs)
    graphs = split_joint(joint.gm, joint.inputs, compiler="eager", **joint.kwargs)
    for gm in graphs:
        for node in calls(gm, aten.detach.default):  # of which each version of torch leaves others
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    return graphs


def rewrite(gm, direction):
    """What the pass returned; run once more it changes nothing."""
    context = PassContext(torch.device("cpu"), "rng", direction)
    result = run_passes(rng_passes(), gm, context)
    before, again = graph_text(gm), run_passes(rng_passes(), gm, context)
    assert (again.modified, again.notes, graph_text(gm)) == (False, (), before)
    return result


def rewritten(fn, *specs):
    """Forward and backward graph after the pass, with what it noted of both."""
    graphs = split(fn, *specs)
    notes = [
        rewrite(gm, direction).notes
        for gm, direction in zip(graphs, ("forward", "backward"), strict=True)
    ]
    return *graphs, *notes


def noisy(x):
    return (x * torch.rand_like(x)).sin()


def test_a_recomputed_operator_draws_from_a_pair():
    forward, backward, fw_notes, bw_notes = rewritten(checkpointed(noisy), (4,))
    assert_expected_inline(
        graph_text(forward),
        """\
primals_1: float32[4]@cuda = placeholder
fwd_rng_state_0: Generator = placeholder
graphsafe_run_with_rng_state: float32[4]@cuda = graphsafe_run_with_rng_state(aten.rand_like.default, primals_1, pin_memory=False, rng_state=fwd_rng_state_0)
mul: float32[4]@cuda = aten.mul.Tensor(primals_1, graphsafe_run_with_rng_state)
sin: float32[4]@cuda = aten.sin.default(mul)
return (sin, primals_1)""",
    )
    assert_expected_inline(
        graph_text(backward),
        """\
primals_1: float32[4]@cuda = placeholder
tangents_1: float32[4]@cuda = placeholder
bwd_rng_state_0: Generator = placeholder
graphsafe_run_with_rng_state: float32[4]@cuda = graphsafe_run_with_rng_state(aten.rand_like.default, primals_1, pin_memory=False, rng_state=bwd_rng_state_0)
mul: float32[4]@cuda = aten.mul.Tensor(primals_1, graphsafe_run_with_rng_state)
cos: float32[4]@cuda = aten.cos.default(mul)
mul_1: float32[4]@cuda = aten.mul.Tensor(tangents_1, cos)
mul_2: float32[4]@cuda = aten.mul.Tensor(mul_1, graphsafe_run_with_rng_state)
return (mul_2,)""",
    )
    assert fw_notes == (RngPairs((CUDA,), positions_at=2),)
    assert bw_notes == (RngPairs((CUDA,), positions_at=1),)


def kinds(x):
    x = x * torch.empty_like(x).bernoulli_(0.5)
    x = x.index_select(0, torch.randperm(4, device=CUDA))
    return x * torch.randint(1, 3, (4,), device=CUDA) * torch.normal(0.0, 1.0, (4,), device=CUDA)


def test_the_backward_meets_them_in_another_order():
    forward, backward, *_ = rewritten(checkpointed(kinds), (4,))
    drawn = "\n--\n".join(
        "\n".join(
            f"{n.args[0]} {n.kwargs['rng_state']}"
            for n in gm.graph.nodes
            if "rng_state" in n.kwargs
        )
        for gm in (forward, backward)
    )
    assert_expected_inline(
        drawn,
        """\
aten.bernoulli.p fwd_rng_state_0
aten.randperm.default fwd_rng_state_1
aten.randint.low fwd_rng_state_2
aten.normal.float_float fwd_rng_state_3
--
aten.normal.float_float bwd_rng_state_3
aten.randint.low bwd_rng_state_2
aten.randperm.default bwd_rng_state_1
aten.bernoulli.p bwd_rng_state_0""",
    )


def saves_noise(ctx, op, *args, **kwargs):
    is_noise = op is aten.rand_like.default
    return CheckpointPolicy.MUST_SAVE if is_noise else CheckpointPolicy.MUST_RECOMPUTE


def policy_saves(x):
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_noise)
    return checkpoint(noisy, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize(
    "fn",
    [lambda x: F.dropout(x, 0.5), checkpointed(lambda x: x.sin().cos()), policy_saves],
    ids=["not recomputed", "not random", "saved by a policy"],
)
def test_left_alone(fn):
    for gm, direction in zip(split(fn, (4,)), ("forward", "backward"), strict=True):
        before = graph_text(gm)
        assert not rewrite(gm, direction).modified
        assert graph_text(gm) == before


def test_what_is_paired():
    """Attention that drops; no generator of the user's own, which nobody winds back in eager either."""

    def fn(q, x, on_cpu):
        dropped, kept = (
            aten._scaled_dot_product_efficient_attention(q, q, q, None, True, p)[0]
            for p in (0.3, 0.0)
        )
        own = aten.rand.generator([4], generator=None, device=CUDA)
        return dropped.sum(), kept.sum(), x * own, on_cpu * torch.rand_like(on_cpu)

    graphs = [fake_cuda_graph(fn, (1, 2, 4, 8), (4,), cpu(3)) for _ in range(2)]
    for gm in graphs:
        (node,) = calls(gm, aten.rand.generator)
        node.kwargs = {**node.kwargs, "generator": gm.graph.find_nodes(op="placeholder")[0]}
    assert pair_random_ops(*graphs, 4) == 2
    for gm, direction in zip(graphs, ("forward", "backward"), strict=True):
        paired = [node.args for node in gm.graph.nodes if PAIR in node.meta]
        assert [args[4:6] for args in paired] == [(True, 0.3), ()]
        (pairs,) = rewrite(gm, direction).notes
        assert pairs.devices == (CUDA, torch.device("cpu"))


def body_of(gm, name):
    """A module whose graph calls `gm` as a region."""
    graph = torch.fx.Graph()
    placeholders = gm.graph.find_nodes(op="placeholder")
    args = [graph.placeholder(node.name) for node in placeholders]
    region = graph.call_function(invoke_subgraph, (graph.get_attr("body"), name, *args))
    for node, given in zip([*args, region], [*placeholders, None], strict=True):
        node.meta["val"] = None if given is None else given.meta["val"]
    graph.output((region,))
    return torch.fx.GraphModule({"body": gm}, graph)


def test_a_pair_in_a_nested_graph_is_refused():
    forward, _ = split(checkpointed(noisy), (4,))
    with pytest.raises(
        PassError, match=r"without a state of their own: \['invoke_subgraph.rand_like"
    ):
        rewrite(body_of(forward, "fw"), "forward")


def test_what_both_graphs_would_draw_on_their_own_is_refused():
    graphs = [body_of(fake_cuda_graph(noisy, (4,)), name) for name in ("fw", "bw")]
    with pytest.raises(
        CheckpointError,
        match="the checkpoint or memory budget around invoke_subgraph would draw ot",
    ):
        require_drawn_once(*graphs)


@pytest.mark.parametrize("nested", [False, True])
def test_a_body_has_its_results_saved_and_no_pairs(nested):
    joint = joint_graph(checkpointed(noisy), (4,))
    inputs = [] if nested else joint.inputs
    graphs = split_joint(joint.gm, inputs, compiler="eager", **joint.kwargs)
    drawn = [sum(PAIR in n.meta for n in gm.graph.nodes) for gm in graphs]
    assert drawn == ([0, 0] if nested else [1, 1])
    assert len(calls(graphs[1], aten.rand_like.default)) == (not nested)
    saved = [node.name for node in graphs[0].graph.output_node().args[0][1:]]
    assert ("rand_like" if nested else "rng_positions") in saved


def test_an_operator_that_only_one_graph_has_left_keeps_its_pair_in_the_other():
    """A compiler may drop what nobody reads; the other graph's inputs and positions stay as they are."""
    forward, backward = split(checkpointed(noisy), (4,))
    for gm in (forward, backward):
        (node,) = calls(gm, aten.rand_like.default)
        if gm is forward:
            node.replace_all_uses_with(gm.graph.find_nodes(op="placeholder")[0])
            gm.graph.erase_node(node)
    (fw_pairs,) = rewrite(forward, "forward").notes
    (bw_pairs,) = rewrite(backward, "backward").notes
    assert fw_pairs.devices == bw_pairs.devices == (CUDA,)
