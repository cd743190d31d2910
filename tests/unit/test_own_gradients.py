"""Gradients that share memory are cloned, in backward graphs only."""

import torch
from expecttest import assert_expected_inline

from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.own_gradients import OwnGradients
from tests.graphs import CUDA, Spec, fake_cuda_graph

BACKWARD = PassContext(CUDA, "rng", "backward")


def apart(fn, *sizes, ctx=BACKWARD):
    result = run_passes((OwnGradients(),), fake_cuda_graph(fn, *sizes), ctx)
    assert not run_passes((OwnGradients(),), result.gm, ctx).modified
    return result


def grads(tangent):
    made = tangent * 2
    return made.view(4, 2), made, made, tangent.t(), made.sum(0)


def test_views_repeats_and_what_came_in_are_cloned():
    result = apart(grads, (2, 4))
    assert result.modified
    assert_expected_inline(
        graph_text(result.gm),
        """\
tangent_1: float32[2, 4]@cuda = placeholder
mul: float32[2, 4]@cuda = aten.mul.Tensor(tangent_1, 2)
view: float32[4, 2]@cuda = aten.view.default(mul, [4, 2])
t: float32[4, 2]@cuda = aten.t.default(tangent_1)
sum_1: float32[4]@cuda = aten.sum.dim_IntList(mul, [0])
clone_default: float32[2, 4]@cuda = aten.clone.default(mul)
clone_default_1: float32[2, 4]@cuda = aten.clone.default(mul)
clone_default_2: float32[4, 2]@cuda = aten.clone.default(t)
return (view, clone_default, clone_default_1, clone_default_2, sum_1)""",
    )


def test_gradients_apart_and_other_graphs_are_left_alone():
    assert not apart(lambda t: (t * 2, (t * 3).t(), t.sum()), (2, 4)).modified
    forward = PassContext(CUDA, "rng", "forward")
    assert not apart(grads, (2, 4), ctx=forward).modified
    assert not apart(lambda t: (t * 2, None), (2, 4)).modified
    offsets = apart(lambda t, n: (t * 2, n, n.view(4)), (2, 4), Spec((2, 2), torch.int64))
    assert not offsets.modified  # of a jagged tensor, which is known by them
