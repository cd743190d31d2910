"""Inside of what `torch.compile` compiles."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cgpass
from tests.recompute.steps import Block, same, tensor, tracker_of

pytestmark = pytest.mark.usefixtures("nothing_compiled_stays")
OPTIONS = {"driver": "simulated", "compiler": "eager"}


def gradients(fn, model, x):
    x.grad = None
    model.zero_grad()
    y = fn(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


class Quiet(Block):
    """A block without dropout."""

    def forward(self, x, *, scale=1.0, table=None):
        weight = 1.0 if table is None else table["w"]
        return x + scale * self.down(F.gelu(self.up(x)).sin()) * weight


def of_a_table(model, x):
    inner = cgpass.checkpoint(model, x)
    return cgpass.checkpoint(model, inner, scale=0.5, table={"w": x.cos()}, use_reentrant=True)


def selective(model, x):
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return cgpass.checkpoint(model, x, context_fn=save)


@pytest.mark.parametrize("program", [of_a_table, selective])
def test_one_graph_that_recomputes(program):
    torch.manual_seed(0)
    model, x = Quiet(), tensor(4, 8, requires_grad=True)
    graphs = []

    def look(gm, inputs):
        graphs.append(gm)
        return cgpass.cgpass(gm, inputs, options=OPTIONS)

    step = functools.partial(program, model)
    compiled = torch.compile(step, backend=look, fullgraph=True)
    expected = gradients(step, model, x)
    for _ in range(4):
        torch.testing.assert_close(gradients(compiled, model, x), expected)
    assert len(graphs) == 1
    assert "checkpoint" in str(graphs[0].graph)


def test_a_tracker_runs_outside_of_the_graph():
    tracker = tracker_of(a=1)
    states = tracker.get_states()
    model, x = Block(), tensor(4, 8, requires_grad=True)

    def inner(x):
        with tracker.fork("a"):
            return F.dropout(model(x), 0.5)

    def step(x):
        return cgpass.checkpoint(inner, x.sin(), rng_tracker=tracker).cos()

    plain = {"driver": "none", "compiler": "eager"}
    found = []
    for fn in (step, torch.compile(step, backend=cgpass.cgpass, options=plain)):
        tracker.set_states(states)
        torch.manual_seed(3)
        found.append(gradients(fn, model, x))
    same(*found)
