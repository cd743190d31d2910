"""Operators named in `unsafe_ops` stay out of graphs, also where torch puts other ones in their place."""

import pytest
import torch
from torch.nn import functional as F

from cgpass import telemetry
from tests.usage import programs

LIB = torch.library.Library("unsafe_ops_tests", "FRAGMENT")
LIB.define("composite(Tensor x) -> Tensor")
LIB.impl("composite", lambda x: (x * 2).sin(), "CompositeImplicitAutograd")
ops = torch.ops.unsafe_ops_tests

CALLS = {
    "aten::gelu": F.gelu,
    "aten::layer_norm": lambda x: F.layer_norm(x, (8,)),
    "aten::native_layer_norm": lambda x: F.layer_norm(x, (8,)),
    "aten::softmax": lambda x: x.softmax(-1),
    "aten::linear": lambda x: F.linear(x, x),
    "aten::matmul": lambda x: x @ x.T,
    "aten::dropout": F.dropout,
    "aten::add_": lambda x: x.sin().add_(1),
    "aten::scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(1, 8, 8),) * 3
    ),
    "unsafe_ops_tests::composite": ops.composite,
    "unsafe_ops_tests::composite.default": ops.composite.default,
}


def before_and_after(op):
    """A training step of `op` between operators that are captured."""

    def program(session):
        def fn(x):
            return (op((x.sin() + 1).cos()) + 1).exp().tanh()

        call = session.compile(fn)
        results = []
        for x in session.batches(8, 8, count=4):
            x.requires_grad_()
            call(x).sum().backward()
            results += [x.grad, call(x.detach())]
        return results

    return program


@pytest.mark.parametrize("name", CALLS)
def test_what_a_named_operator_is_traced_as_runs_between_graphs(way, name):
    before = telemetry.counters()["graphs"]
    way.compare(before_and_after(CALLS[name]), unsafe_ops=(name,), min_partition_ops=1)
    graphs = [g for g in telemetry.graphs(before) if g.partitions and g.direction != "backward"]
    assert graphs
    for graph in graphs:
        eager = [p for p in graph.partitions if not p.captured]
        assert eager, str(graph)
        assert all(f"{name}" in reason for p in eager for reason in p.lines), str(graph)


def test_with_inductor_too():
    torch.compiler.reset()
    call = torch.compile(
        lambda x: F.gelu(x.sin() + 1).cos().exp(),
        backend="cgpass",
        options={
            "driver": "simulated",
            "unsafe_ops": ("aten::gelu",),
            "min_partition_ops": 1,
            "on_skip": "silent",
        },
    )
    with programs.counted() as counters:
        for _ in range(3):
            call(torch.ones(4))
    assert (counters["partitions_captured"], counters["partitions_eager"]) == (2, 1)
    assert (counters["recordings"], counters["replays"]) == (2, 4)
    torch.compiler.reset()
