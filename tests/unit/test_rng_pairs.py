"""Which random operators the split pairs and which it saves, where they run on several devices or as DTensor's."""

import importlib

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cgpass
from cgpass import torch_private
from cgpass.compile.passes.rng_pairs import PAIR, split_joint
from tests.graphs import CUDA, calls, joint_graph

aten = torch.ops.aten


def split(fn, compiler):
    joint = joint_graph(fn, (4, 4))
    return split_joint(joint.gm, joint.inputs, compiler=compiler, **joint.kwargs)


def pairs(gm):
    return sorted(node.meta[PAIR] for node in gm.graph.nodes if PAIR in node.meta)


def dropout_twice(x):
    for _ in range(2):
        x = checkpoint(lambda x: F.dropout(x.sin(), 0.5).cos(), x, use_reentrant=False)
    return x


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_not_recomputed_leaves_pairs_alone(compiler, device):
    def fn(x):
        steps = torch.randint(0, 1000, (4,), device=device)
        return dropout_twice(x + steps.to(x.device))

    forward, backward = split(fn, compiler)
    assert pairs(forward) == pairs(backward) == [0, 1]
    assert len(calls(forward, aten.randint.low)) == 1
    assert calls(backward, aten.randint.low) == []


def noise_of_the_cpu(x):
    def fn(x):
        return x.sin() * torch.rand(4, device="cpu").to(x.device)

    return dropout_twice(checkpoint(fn, x, use_reentrant=False))


@pytest.mark.parametrize(("compiler", "recomputed"), [("inductor", 0), ("eager", 1)])
def test_what_inductor_can_not_draw_again_on_the_cpu_is_saved(compiler, recomputed):
    forward, backward = split(noise_of_the_cpu, compiler)
    assert len(calls(forward, aten.rand.default)) == 1
    assert len(calls(backward, aten.rand.default)) == recomputed
    assert pairs(forward) == pairs(backward) == list(range(2 + recomputed))


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_what_dtensor_draws_is_saved(compiler):
    """It reads and moves the default generator, and is traced under checkpoints from torch 2.13 on."""
    operators = importlib.import_module("torch._prims.rng_prims")
    op = getattr(operators, "run_dtensor_rng_op", None)
    if op is None:
        pytest.skip("this torch has no such operator")

    def fn(x):
        return checkpoint(lambda x: (x.sin() * torch.rand_like(x)).cos(), x, use_reentrant=False)

    joint = joint_graph(fn, (4, 4))
    (drawn,) = calls(joint.gm, aten.rand_like.default)
    with joint.gm.graph.inserting_before(drawn):
        new = joint.gm.graph.call_function(op, (0, 4, drawn.target, *drawn.args), drawn.kwargs)
    new.meta = dict(drawn.meta)
    drawn.replace_all_uses_with(new)
    joint.gm.graph.erase_node(drawn)
    forward, backward = split_joint(joint.gm, joint.inputs, compiler=compiler, **joint.kwargs)
    assert len(calls(forward, op)) == 1
    assert calls(backward, op) == []


@pytest.mark.parametrize(
    "setting",
    [{"activation_memory_budget": 0.2}, {"aggressive_recomputation": True}],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_masks_under_a_memory_budget_are_the_forwards(setting, compiler):
    """Nothing marks what is drawn again, and Inductor makes no CPU kernel of pairs."""
    options = {"compiler": compiler, "driver": "simulated"}
    torch.compiler.reset()
    call = torch.compile(
        lambda x: F.dropout(torch.exp(x), 0.3), backend=cgpass.cgpass, options=options
    )
    with torch._functorch.config.patch(**setting):
        for _ in range(3):
            x = torch.randn(64, 64, requires_grad=True)
            out = call(x)
            out.sum().backward()
            assert torch.equal(out != 0, x.grad != 0)


@pytest.mark.parametrize(
    "meta", [{"memory_budget": 0.3}, {"custom": {"_region_activation_memory_budget": 0.3}}]
)
def test_a_regions_budget_is_seen(meta):
    gm = joint_graph(lambda x: x.sin(), (4,)).gm
    assert not torch_private.recomputes_unmarked(gm)
    gm.graph.output_node().meta.update(meta)
    assert torch_private.recomputes_unmarked(gm)
