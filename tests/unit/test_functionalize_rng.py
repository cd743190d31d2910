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

from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes import rng_passes
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.rng_pairs import PAIR, RngPairs, pair_random_ops, split_joint
from tests.graphs import CUDA, calls, cpu, fake_cuda_graph, joint_graph

aten = torch.ops.aten


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
    return run_passes(rng_passes(), gm, PassContext(torch.device("cpu"), "rng", direction))


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


def attention(dropout_p):
    return checkpointed(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p))


@pytest.mark.parametrize(("dropout_p", "num_pairs"), [(0.3, 1), (0.0, 0)])
def test_fused_attention_has_a_pair_only_if_it_drops(dropout_p, num_pairs):
    attend = aten._scaled_dot_product_efficient_attention.default

    def fused(q):
        return (attend(q, q, q, None, True, dropout_p)[0].sum(),)

    def graph():
        return fake_cuda_graph(fused, (1, 2, 4, 8))

    forward, backward = graph(), graph()
    assert pair_random_ops(forward, backward, 1) == num_pairs
    assert len(calls(forward, attend)) == 1
    assert sum(PAIR in node.meta for node in forward.graph.nodes) == num_pairs


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
    [
        lambda x: F.dropout(x, 0.5),
        checkpointed(lambda x: x.sin().cos()),
        attention(0.0),
        policy_saves,
    ],
    ids=["not recomputed", "not random", "attention without dropout", "saved by a policy"],
)
def test_left_alone(fn):
    specs = [(1, 2, 4, 8)]
    for gm, direction in zip(split(fn, *specs), ("forward", "backward"), strict=True):
        before = graph_text(gm)
        result = rewrite(gm, direction)
        assert not result.modified
        assert result.notes == ()
        assert graph_text(gm) == before


def test_a_generator_of_the_users_own_is_no_pair():
    """Nobody winds it back in eager either."""

    def draws(x):
        return (x * aten.rand.generator([4], generator=None, device=CUDA),)

    graphs = [fake_cuda_graph(draws, (4,)) for _ in range(2)]
    for gm in graphs:
        (node,) = calls(gm, aten.rand.generator)
        node.kwargs = {**node.kwargs, "generator": gm.graph.find_nodes(op="placeholder")[0]}
    assert pair_random_ops(*graphs, 1) == 0


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


def test_a_pair_on_the_cpu_beside_one_on_cuda():
    def both(x, y):
        return (x * torch.rand_like(x)).sin(), (y * torch.rand_like(y)).sin()

    graphs = [fake_cuda_graph(both, (4,), cpu(3)) for _ in range(2)]
    assert pair_random_ops(*graphs, 2) == 2
    notes = [rewrite(gm, d).notes for gm, d in zip(graphs, ("forward", "backward"), strict=True)]
    assert [pairs.devices for (pairs,) in notes] == [(CUDA, torch.device("cpu"))] * 2
