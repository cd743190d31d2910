"""Gradients that share memory are cloned, in backward graphs only."""

import torch
from expecttest import assert_expected_inline

from cgpass.compile.passes.base import PassContext, graph_text, run_passes
from cgpass.compile.passes.own_gradients import OwnGradients
from tests.graphs import CUDA, Spec, fake_cuda_graph

BACKWARD = PassContext(CUDA, "rng", "backward")


def apart(fn, *sizes, ctx=BACKWARD):
    gm = fake_cuda_graph(fn, *sizes)
    before = graph_text(gm)
    run_passes((OwnGradients(),), gm, ctx)
    once = graph_text(gm)
    run_passes((OwnGradients(),), gm, ctx)
    assert graph_text(gm) == once
    return "" if once == before else once


def grads(tangent):
    made = tangent * 2
    return made.view(4, 2), made, made, tangent.t(), made.sum(0)


def test_views_repeats_and_what_came_in_are_cloned():
    assert_expected_inline(
        apart(grads, (2, 4)),
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
    assert not apart(lambda t: (t * 2, (t * 3).t(), t.sum()), (2, 4))
    forward = PassContext(CUDA, "rng", "forward")
    assert not apart(grads, (2, 4), ctx=forward)
    assert not apart(lambda t: (t * 2, None), (2, 4))
    offsets = apart(lambda t, n: (t * 2, n, n.view(4)), (2, 4), Spec((2, 2), torch.int64))
    assert not offsets  # of a jagged tensor, which is known by them
