"""Graphs that may run once more than they are called, on copies of what they write."""

import dataclasses

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

import cgpass
from cgpass.assembly import _is_repeatable
from cgpass.graph.inputs import input_infos
from cgpass.graph.values import bodies, hop_name, is_repeatable
from tests.graphs import calls, fake_cuda_graph, inference_graph


def writes(x, y):
    y.add_(x)
    return y * 2


def writes_beside(x, y):
    y.as_strided((2,), (3,)).add_(1)
    return x * 2


@torch.library.custom_op("repeatable::fill", mutates_args=("y",))
def fill(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)  # and who knows what else


@fill.register_fake
def _(x, y):
    return None


@torch.library.custom_op("repeatable::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    return x.clone()  # with what it got from another process, say


@exchange.register_fake
def _(x):
    return torch.empty_like(x)


def calls_a_custom_operator(x, y):
    return torch.ops.repeatable.exchange(x) * y


def writes_by_a_custom_operator(x, y):
    torch.ops.repeatable.fill(x, y)
    return x * y


def says(x, y):
    torch.ops.aten._assert_async.msg(x.sum() > 0, "positive")
    return x * y


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (torch.add, True),
        (writes, True),
        (writes_beside, False),
        (writes_by_a_custom_operator, False),
        (calls_a_custom_operator, False),
        (says, False),
    ],
)
@pytest.mark.parametrize("traced", [fake_cuda_graph, inference_graph])
def test_what_may_run_once_more(traced, fn, expected):
    """Dynamo asks that `as_strided` stays in its input's place; AOTAutograd wraps operators that write."""
    gm = traced(fn, (3,), (4,) if fn is writes_beside else (3,))
    infos = input_infos(gm, static=())
    assert _is_repeatable(gm, infos) is expected
    read = tuple(dataclasses.replace(info, mutated=False) for info in infos)
    assert _is_repeatable(gm, read) is (expected or fn is writes_beside)


def test_operators_that_write_are_wrapped():
    gm = inference_graph(writes_by_a_custom_operator, (3,), (3,))
    assert any(hop_name(node) == "auto_functionalized_v2" for node in gm.graph.nodes)


@pytest.mark.parametrize("kind", ["mutation", "functional"])
def test_what_triton_kernels_do_nobody_knows(kind):
    gm = fake_cuda_graph(torch.mul, (3,), (3,))
    (node,) = calls(gm, torch.ops.aten.mul.Tensor)
    assert is_repeatable(node)
    node.target = getattr(triton_kernel_wrap, f"triton_kernel_wrapper_{kind}")
    node.args = ()
    assert not is_repeatable(node)


def test_nested_graphs_are_looked_into():
    def region(call):
        inner = torch.compiler.nested_compile_region(lambda x, y: call(x, y) + 1)
        return lambda x, y: inner(inner(x, y), y)  # newer torch inlines what is called once

    for fn, expected in ((torch.mul, True), (calls_a_custom_operator, False)):
        gm = inference_graph(region(fn), (3,), (3,))
        nested = [node for node in gm.graph.nodes if bodies(node)]
        assert [is_repeatable(node) for node in nested] == [expected] * 2


def test_a_custom_operator_runs_as_often_as_it_is_called():
    """However the graphs around it are judged."""
    ran = {}
    for policy in ("always", "measured"):
        ran[policy] = []

        @torch.library.custom_op(f"repeatable::bump_{policy}", mutates_args=("y",))
        def bump(x: torch.Tensor, y: torch.Tensor, to: str = policy) -> None:
            ran[to].append(1)
            y.add_(x)

        bump.register_fake(lambda x, y, to="": None)

        def fn(x, y, bump=bump):
            bump(x, y)
            return (y * 2).sin()

        options = cgpass.Options(driver="simulated", compiler="eager", capture_policy=policy)
        compiled = torch.compile(fn, backend=cgpass.cgpass, options=options)
        x, y = torch.ones(3), torch.zeros(3)
        with torch.no_grad():
            for _ in range(12):
                compiled(x, y)
        assert cgpass.counters()["replays"] > 8
        cgpass.reset()
    assert ran["always"] == ran["measured"]
