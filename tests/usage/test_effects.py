"""Operators with registered side effects run between graphs, and so do the tokens that order them."""

import pytest
import torch
from torch._library.effects import EffectType

from cgpass import telemetry

NOTED = []


@torch.library.custom_op("effects_tests::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    NOTED.append(x.sum().item())
    return x * 2


note.register_fake(torch.empty_like)
if hasattr(note, "register_effect"):
    note.register_effect(EffectType.ORDERED)
else:
    torch.library._register_effectful_op("effects_tests::note", EffectType.ORDERED)


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
