"""The split of a joint graph, on fake CUDA tensors."""

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes.split_joint import split_joint
from tests.graphs import Joint, Spec, calls, joint_graph

aten = torch.ops.aten


def split(joint: Joint, compiler="inductor"):
    return split_joint(joint.gm, joint.inputs, compiler=compiler, **joint.kwargs)


def names(gm, op):
    return [node.name for node in gm.graph.find_nodes(op=op)]


def product(x, w):
    return (x.sin() * w).cos()


def test_cuts_where_the_fewest_bytes_are_saved():
    forward, backward = split(joint_graph(product, (3, 4), (4,)))
    assert_expected_inline(
        graph_text(forward),
        """\
primals_1: float32[3, 4]@cuda = placeholder
primals_2: float32[4]@cuda = placeholder
sin: float32[3, 4]@cuda = aten.sin.default(primals_1)
mul: float32[3, 4]@cuda = aten.mul.Tensor(sin, primals_2)
cos: float32[3, 4]@cuda = aten.cos.default(mul)
return (cos, primals_1, primals_2)""",
    )
    assert_expected_inline(
        graph_text(backward),
        """\
primals_1: float32[3, 4]@cuda = placeholder
primals_2: float32[4]@cuda = placeholder
tangents_1: float32[3, 4]@cuda = placeholder
sin: float32[3, 4]@cuda = aten.sin.default(primals_1)
mul: float32[3, 4]@cuda = aten.mul.Tensor(sin, primals_2)
sin_1: float32[3, 4]@cuda = aten.sin.default(mul)
neg: float32[3, 4]@cuda = aten.neg.default(sin_1)
mul_1: float32[3, 4]@cuda = aten.mul.Tensor(tangents_1, neg)
mul_2: float32[3, 4]@cuda = aten.mul.Tensor(mul_1, sin)
mul_3: float32[3, 4]@cuda = aten.mul.Tensor(mul_1, primals_2)
sum_1: float32[1, 4]@cuda = aten.sum.dim_IntList(mul_2, [0], True)
view: float32[4]@cuda = aten.view.default(sum_1, [4])
cos_1: float32[3, 4]@cuda = aten.cos.default(primals_1)
mul_4: float32[3, 4]@cuda = aten.mul.Tensor(mul_3, cos_1)
return (mul_4, view)""",
    )


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


def test_the_same_graph_is_split_the_same_way():
    first, second = (split(joint_graph(product, (3, 4), (4,))) for _ in range(2))
    assert [graph_text(gm) for gm in first] == [graph_text(gm) for gm in second]


def test_an_unknown_keyword_of_a_later_torch_is_ignored():
    joint = joint_graph(product, (3, 4), (4,))
    joint.kwargs["something_new"] = True
    forward, _ = split(joint)
    assert names(forward, "placeholder") == ["primals_1", "primals_2"]
