"""Sizes that vary around an operator that can't be captured."""

import logging

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cgpass import _torch
from tests.usage.test_failures import COMPILERS, Around, close, fails, syncs, warned


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


def test_sizes_that_a_split_was_not_compiled_for(setting, caplog, monkeypatch):
    """Kernels made in the middle of a call may assume things of sizes that no guard checks."""
    compiled = []

    def choosy(gm, example_inputs, inner=_torch.inductor_inner, **settings):
        compiled.append(gm)
        if len(compiled) > 1:  # the first is the whole graph, whose guards are checked
            assert all(size < 6 for size in example_inputs if isinstance(size, torch.SymInt))
        return inner(gm, example_inputs, **settings)

    def program(session):
        compiled.clear()
        _, call = session.compiled(lambda: Around(fails), dynamic=True)
        with torch.no_grad():
            return [call(session.randn(size, 8)).clone() for size in (3, 5, 7, 3, 5, 7, 8, 3)]

    monkeypatch.setattr(_torch, "inductor_inner", choosy)
    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = close(setting, program, compiler="inductor")
    assert counters["partitions_captured"] == 2
    assert counters["plain_calls"] == 2
    assert counters["replays"] > 0
    _, message = warned(caplog)
    assert "parts are not made for inputs of sizes [7]: such calls run without a graph" in message
