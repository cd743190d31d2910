"""Inside of what `torch.compile` compiles."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cgpass
from tests.recompute.steps import Block, same, tensor

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:`torch.jit:DeprecationWarning",
)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(fn, model, x):
    x.grad = None
    model.zero_grad()
    y = fn(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


class Quiet(Block):
    """A block without dropout."""

    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(F.gelu(self.up(x)).sin())


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_graph_that_recomputes(reentrant):
    torch.manual_seed(0)
    model, x = Quiet(), tensor(4, 8, requires_grad=True)
    graphs = []

    def step(x):
        return cgpass.checkpoint(model, x, scale=0.5, use_reentrant=reentrant).exp()

    def look(gm, inputs):
        graphs.append(gm)
        return cgpass.cgpass(gm, inputs, options={"driver": "simulated", "compiler": "eager"})

    compiled = torch.compile(step, backend=look, fullgraph=True)
    expected = gradients(step, model, x)
    for _ in range(4):
        found = gradients(compiled, model, x)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1
    assert "checkpoint" in str(graphs[0].graph)


def test_through_the_registered_backend():
    torch.manual_seed(0)
    model, x = Quiet(), tensor(4, 8, requires_grad=True)
    options = {"driver": "simulated", "compiler": "eager"}

    def step(x):
        return cgpass.checkpoint(model, cgpass.checkpoint(model, x))

    compiled = torch.compile(step, backend=cgpass.cgpass, options=options)
    expected = gradients(step, model, x)
    for _ in range(4):
        for a, b in zip(expected, gradients(compiled, model, x), strict=True):
            torch.testing.assert_close(a, b)


def test_a_compiled_function_inside_a_checkpoint():
    torch.manual_seed(0)
    model, x = Quiet(), tensor(4, 8, requires_grad=True)
    compiled = torch.compile(
        model, backend=cgpass.cgpass, options={"driver": "simulated", "compiler": "eager"}
    )
    expected = gradients(model, model, x)
    for _ in range(4):
        found = gradients(lambda x: cgpass.checkpoint(compiled, x), model, x)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)


def test_a_tracker_runs_outside_of_the_graph():
    tracker = cgpass.RNGStatesTracker("cpu")
    tracker.add("a", 1)
    model, x = Block(), tensor(4, 8, requires_grad=True)

    def inner(x):
        with tracker.fork("a"):
            return F.dropout(model(x), 0.5)

    def step(x):
        return cgpass.checkpoint(inner, x.sin(), rng_tracker=tracker).cos()

    found = []
    for fn in (
        step,
        torch.compile(step, backend=cgpass.cgpass, options={"driver": "none", "compiler": "eager"}),
    ):
        tracker.reset()
        tracker.add("a", 1)
        torch.manual_seed(3)
        found.append(gradients(fn, model, x))
    same(*found)


def test_a_selective_policy():
    torch.manual_seed(0)
    model, x = Quiet(), tensor(4, 8, requires_grad=True)
    save = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def step(x):
        return cgpass.checkpoint(model, x, context_fn=save)

    options = {"driver": "simulated", "compiler": "eager"}
    compiled = torch.compile(step, backend=cgpass.cgpass, options=options)
    expected = gradients(step, model, x)
    for _ in range(4):
        for a, b in zip(expected, gradients(compiled, model, x), strict=True):
            torch.testing.assert_close(a, b)
