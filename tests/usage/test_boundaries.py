"""Operators with registered side effects run between graphs, and so do those that `unsafe_ops` names."""

import pytest
import torch
from torch.nn import functional as F

from cgpass import telemetry
from tests.operators import with_effect

NOTED = []


@torch.library.custom_op("effects_tests::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    NOTED.append(x.sum().item())
    return x * 2


note.register_fake(torch.empty_like)
with_effect(note)


def twice(session):
    def fn(x):
        return note((note((x * 2).sin()) * x).sin().cos()).exp() * 2

    call = session.compile(fn)
    NOTED.clear()
    results = [call(x) for x in session.batches(4, count=4)]
    return [*results, torch.tensor(NOTED)]


def backward_that_checks(session):
    """The backward of `eigvals` checks for errors of the solver, which torch orders as an effect."""
    call = session.compile(lambda x: (torch.linalg.eigvals((x * 2).sin()).real.sum() * x).sin())
    results = []
    for x in session.batches(4, 4, count=4):
        x.requires_grad_()
        call(x).sum().backward()
        results.append(x.grad)
    return results


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("program", [twice, backward_that_checks])
def test_effects_happen_at_every_call_between_graphs(slow_way, program, caplog):
    before = telemetry.counters()["graphs"]
    with caplog.at_level("WARNING", "cgpass"):
        slow_way.compare(program, min_partition_ops=1, on_skip="warn")
    graph = [g for g in telemetry.graphs(before) if g.partitions][-1]
    assert any(part.captured for part in graph.partitions), str(graph)
    if program is twice:
        assert "with_effects(effects_tests.note.default) at" in str(graph)
        assert "with_effects(effects_tests.note.default) at" in caplog.text
    assert "token" not in caplog.text


class Whitened(torch.nn.Module):
    """Checks for errors of a solver between parameters, with the batch first or last among what it reads."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 6)
        self.last = torch.nn.Parameter(torch.randn(6, 16))

    def forward(self, x):
        z = self.first(x)
        factor = torch.linalg.cholesky(z.T @ z / len(z) + torch.eye(6, device=x.device))
        z = ((z @ factor) @ self.last).sin()
        return z.square().mean(), z


@pytest.mark.parametrize("check", ["rerecord", "off"])
def test_effects_in_a_forward_with_parameters(way, check):
    def program(session):
        module, call = session.compiled(Whitened)
        values = []
        for x in session.batches(9, 8, count=8):
            loss, z = call(x)
            loss.backward()
            values += [loss.detach(), z.detach(), *[p.grad.clone() for p in module.parameters()]]
            module.zero_grad()
        return values

    counters = way.compare(program, static_input_check=check)
    assert counters["warmups"] == counters["partitions_captured"]
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0


# ---- operators named in unsafe_ops, also where torch puts other ones in their place


LIB = torch.library.Library("unsafe_ops_tests", "FRAGMENT")
LIB.define("composite(Tensor x) -> Tensor")
LIB.impl("composite", lambda x: (x * 2).sin(), "CompositeImplicitAutograd")
ops = torch.ops.unsafe_ops_tests

CALLS = {
    "aten::gelu": F.gelu,
    "aten::native_layer_norm": lambda x: F.layer_norm(x, (8,)),
    "aten::linear": lambda x: F.linear(x, x),
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
        assert all(name in str(reason) for p in eager for reason in p.reasons), str(graph)
