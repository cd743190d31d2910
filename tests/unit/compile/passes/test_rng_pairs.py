"""The split of a joint graph: what is saved, and pairs of random operators in both graphs, on fake CUDA tensors."""

import functools
import importlib

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass.compile.passes.base import PassContext, graph_text, run_passes
from cgpass.compile.passes.own_gradients import OwnGradients
from cgpass.compile.passes.rng_pairs import (
    PAIR,
    FunctionalizeRng,
    RngPairs,
    pair_random_ops,
    split_joint,
)
from tests.graphs import CUDA, calls, cpu, fake_cuda_graph, joint_graph

aten = torch.ops.aten
CPU = torch.device("cpu")


def checkpointed(fn, **settings):
    return lambda *args: checkpoint(fn, *args, use_reentrant=False, **settings)


def split(joint, compiler="eager", inputs=None):
    """Forward and backward graph with their pairs marked."""
    inputs = joint.inputs if inputs is None else inputs
    graphs = split_joint(joint.gm, inputs, compiler=compiler, **joint.kwargs)
    for gm in graphs:
        for node in calls(gm, aten.detach.default):  # of which each version of torch leaves others
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    return graphs


def rewrite(graphs):
    """The pass's notes of a forward and a backward graph."""
    contexts = (PassContext(CPU, "rng", direction) for direction in ("forward", "backward"))
    passes = OwnGradients(), FunctionalizeRng()
    return [run_passes(passes, *each) for each in zip(graphs, contexts, strict=True)]


def pairs(gm):
    return sorted(node.meta[PAIR] for node in gm.graph.nodes if PAIR in node.meta)


def noisy(x):
    return (x * torch.rand_like(x)).sin()


def test_a_recomputed_operator_draws_from_a_pair():
    forward, backward = graphs = split(joint_graph(checkpointed(noisy), (4,)))
    notes = rewrite(graphs)
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
    assert notes == [[RngPairs((CUDA,), positions_at=at)] for at in (2, 1)]


def saves_noise(ctx, op, *args, **kwargs):
    is_noise = op is aten.rand_like.default
    return CheckpointPolicy.MUST_SAVE if is_noise else CheckpointPolicy.MUST_RECOMPUTE


def by_policy(fn, policy):
    return checkpointed(
        fn, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.5),
        checkpointed(lambda x: x.sin().cos()),
        by_policy(noisy, saves_noise),
    ],
    ids=["not recomputed", "not random", "saved by a policy"],
)
def test_left_alone(fn):
    graphs = split(joint_graph(fn, (4,)))
    before = [*map(graph_text, graphs)]
    assert rewrite(graphs) == [[], []]
    assert [*map(graph_text, graphs)] == before


def test_what_is_paired():
    """Attention that drops, on the CPU, too; no generator of the user's own: nobody winds it back in eager either."""

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
    paired = [[node.args[5:] for node in gm.graph.nodes if PAIR in node.meta] for gm in graphs]
    assert paired == [[(0.3,), ()]] * 2
    assert [notes.devices for (notes,) in rewrite(graphs)] == [(CUDA, CPU)] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_body_has_its_results_saved_and_no_pairs(nested):
    graphs = split(joint_graph(checkpointed(noisy), (4,)), inputs=[] if nested else None)
    assert [*map(pairs, graphs)] == ([[], []] if nested else [[0], [0]])
    assert len(calls(graphs[1], aten.rand_like.default)) == (not nested)
    saved = [node.name for node in graphs[0].graph.output_node().args[0][1:]]
    assert ("rand_like" if nested else "rng_positions") in saved


def test_an_operator_that_only_one_graph_has_left_keeps_its_pair_in_the_other():
    """A compiler may drop what nobody reads; the other graph's inputs and positions stay as they are."""
    forward, _ = graphs = split(joint_graph(checkpointed(noisy), (4,)))
    (node,) = calls(forward, aten.rand_like.default)
    node.replace_all_uses_with(forward.graph.find_nodes(op="placeholder")[0])
    forward.graph.erase_node(node)
    assert [notes.devices for (notes,) in rewrite(graphs)] == [(CUDA,)] * 2


@pytest.mark.parametrize(("compiler", "recomputed"), [("inductor", 0), ("eager", 1)])
def test_what_inductor_can_not_draw_again_on_the_cpu_is_saved(compiler, recomputed):
    def noise_of_the_cpu(x):
        return x.sin() * torch.rand(4, device="cpu").to(x.device)

    def fn(x):
        x = checkpointed(noise_of_the_cpu)(x)
        return checkpointed(lambda x: F.dropout(x.sin(), 0.5).cos())(x)

    forward, backward = split(joint_graph(fn, (4, 4)), compiler)
    assert len(calls(forward, aten.rand.default)) == 1
    assert len(calls(backward, aten.rand.default)) == recomputed
    assert pairs(forward) == pairs(backward) == [*range(1 + recomputed)]


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_what_dtensor_draws_is_saved(compiler):
    """It reads and moves the default generator, and is traced under checkpoints from torch 2.13 on."""
    operators = importlib.import_module("torch._prims.rng_prims")
    op = getattr(operators, "run_dtensor_rng_op", None)
    if op is None:
        pytest.skip("this torch has no such operator")

    joint = joint_graph(checkpointed(noisy), (4, 4))
    (drawn,) = calls(joint.gm, aten.rand_like.default)
    with joint.gm.graph.inserting_before(drawn):
        new = joint.gm.graph.call_function(op, (0, 4, drawn.target, *drawn.args), drawn.kwargs)
    new.meta = dict(drawn.meta)
    drawn.replace_all_uses_with(new)
    joint.gm.graph.erase_node(drawn)
    forward, backward = split(joint, compiler)
    assert len(calls(forward, op)) == 1
    assert calls(backward, op) == []
