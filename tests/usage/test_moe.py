"""A mixture of experts from transformers is one forward and one backward graph."""

from importlib.metadata import version

import pytest
import torch
from benchlib.models import SPECS

import cgpass
from cgpass import telemetry

EXPERTS = "transformers.grouped_mm_fallback"
"""The operator and that of its backward."""


def step(model, call, tokens):
    loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_mixtral_is_one_forward_and_one_backward_graph(compiler):
    torch.manual_seed(0)
    try:
        model = SPECS["mixtral"].build(True).model
    except ImportError as error:
        pytest.skip(f"transformers can't load Mixtral here: {error}")
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = step(model, model, tokens)
    options = {"driver": "simulated", "compiler": compiler, "on_skip": "silent"}
    before = telemetry.counters()["graphs"]
    call = torch.compile(model, backend=cgpass.cgpass, options=options)
    for _ in range(3):
        torch.testing.assert_close(step(model, call, tokens), expected)
    torch.compiler.reset()
    graphs = telemetry.graphs(before)
    reasons = [r for graph in graphs for part in graph.partitions for r in part.lines]
    if not any(EXPERTS in reason for reason in reasons):
        pytest.skip(f"transformers {version('transformers')} has experts that can be traced")
    assert [graph.direction for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        eager = [part for part in graph.partitions if not part.captured]
        assert len(eager) < len(graph.partitions)
        assert all(any(EXPERTS in reason for reason in part.lines) for part in eager)
