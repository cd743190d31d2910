"""The split of a joint graph, on fake CUDA tensors."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass.compile.passes.rng_pairs import split_joint
from tests.graphs import Joint, Spec, calls, joint_graph

aten = torch.ops.aten


def split(joint: Joint, compiler="inductor"):
    return split_joint(joint.gm, joint.inputs, compiler=compiler, **joint.kwargs)


def names(gm, op):
    return [node.name for node in gm.graph.find_nodes(op=op)]


def product(x, w):
    return (x.sin() * w).cos()


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_saved_values_join_forward_to_backward(compiler):
    joint = joint_graph(lambda x, w: torch.relu(x @ w).sum(), (3, 4), (4, 5))
    forward, backward = split(joint, compiler)
    returned = forward.graph.output_node().args[0]
    saved = [node.name for node in returned[joint.kwargs["num_fwd_outputs"] :]]
    assert names(backward, "placeholder") == [*saved, "tangents_1"]
    assert len(backward.graph.output_node().args[0]) == 2


def block(policy, x, w):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    inner = lambda x: ((x @ w).sin() @ w).cos()  # noqa: E731
    return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)


def recompute_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def save_products(ctx, op, *args, **kwargs):
    is_product = op is aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE


def products(gm):
    return len(calls(gm, aten.mm.default))


@pytest.mark.parametrize(
    ("policy", "in_backward"),
    [(recompute_all, 4 + 2), (save_products, 4)],
    ids=["recompute", "save"],
)
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_checkpoint_policies_are_honoured(policy, in_backward, compiler):
    joint = joint_graph(functools.partial(block, policy), (4, 4), (4, 4))
    forward, backward = split(joint, compiler)
    assert (products(forward), products(backward)) == (2, in_backward)


def test_an_input_without_gradient_gets_none():
    joint = joint_graph(product, Spec((3, 4)), Spec((4,), grad=True))
    _, backward = split(joint)
    gradients = backward.graph.output_node().args[0]
    assert sorted(grad is None for grad in gradients) == [False, True]
