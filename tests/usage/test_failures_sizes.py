"""Sizes that vary around an operator that can't be captured."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cgpass import torch_private
from tests.usage.test_failures import COMPILERS, Around, close, fails, syncs


def test_sizes_that_vary_around_a_guilty_operator(setting):
    def program(session):
        _, call = session.compiled(lambda: Around(fails), dynamic=True)
        with torch.no_grad():
            sizes = (3, 5, 3, 5, 7, 3, 5, 7, 3)
            return [call(session.randn(size, 8)).clone() for size in sizes]

    for compiler in COMPILERS:
        counters = close(setting, program, compiler=compiler)
        assert counters["partitions_captured"] == 2
        assert counters["replays"] > 0


def dropout_of_varying_sizes(session):
    """Training with recomputed dropouts; what was dropped has no gradient."""

    def drops(x):
        return nn.functional.dropout(x * 2, 0.5) * 3

    def forward(x):
        for _ in range(3):
            x = checkpoint(drops, x, use_reentrant=False)
        return syncs(x) * 1.5

    call = session.compile(forward, dynamic=True)
    values = []
    for number in range(8):
        x = session.randn(8 + number % 2, 16).abs().add(0.1).requires_grad_()
        out = call(x)
        out.sum().backward()
        assert torch.equal(out != 0, x.grad != 0)
        values += [out.detach(), x.grad]
    return values


def test_a_dropout_of_varying_sizes_draws_the_same_after_a_split(setting):
    counters = setting.compare(dropout_of_varying_sizes, compiler="inductor", on_skip="silent")
    assert counters["replays"] > 0


def test_sizes_that_kernels_were_not_compiled_for(setting, monkeypatch):
    """What kernels assume of sizes is guarded, whenever they are compiled."""
    assumed = []

    def choosy(gm, example_inputs, inner=torch_private.inductor_inner, **settings):
        sizes = [size for size in example_inputs if isinstance(size, torch.SymInt)]
        assumed.append(all(size < 6 for size in sizes))
        return inner(gm, example_inputs, **settings)

    def program(session):
        _, call = session.compiled(lambda: Around(fails), dynamic=True)
        with torch.no_grad():
            sizes = (3, 5, 3, 7, 5, 7, 3, 7, 8, 3, 7)
            return [call(session.randn(size, 8)).clone() for size in sizes]

    monkeypatch.setattr(torch_private, "inductor_inner", choosy)
    counters = close(setting, program, compiler="inductor", on_skip="silent")
    assert {True, False} <= {*assumed}
    assert counters["partitions_captured"] == 2 * 2
    assert counters["replays"] > 0
