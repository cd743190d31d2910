"""Checkpoints inside selective checkpoints: what the outer one saves is no state of the inner one's."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from cgpass.runtime.simulated import SimulatedDriver
from tests.recompute.steps import plain, same, tensor

aten = torch.ops.aten
CHEAP = (aten.sin.default, aten.cos.default)
RANDOM = (aten.rand_like.default,)


def save_by_default(ctx, op, *args, **kwargs):
    recomputed = op in CHEAP or op._schema.is_mutable
    return CheckpointPolicy.PREFER_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE


def save_all_but_random(ctx, op, *args, **kwargs):
    recomputed = op in RANDOM or op._schema.is_mutable
    return CheckpointPolicy.PREFER_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE


def recompute_by_default(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = [save_by_default, save_all_but_random, recompute_by_default]
OUTER = {"cgpass": cgpass.checkpoint, "torch": functools.partial(torchs, use_reentrant=False)}
INNER = {
    "hooks": cgpass.checkpoint,
    "reentrant": functools.partial(cgpass.checkpoint, use_reentrant=True),
}


def block(x):
    return (x.sin() * torch.rand_like(x)).cos()


def forward(outer, inner, x):
    return outer(lambda x: inner(block, inner(block, x * torch.rand_like(x))).sin(), x)


def gradient(outer, inner):
    torch.manual_seed(0)
    x = tensor(3, 5, requires_grad=True)
    y = forward(outer, inner, x)
    between = torch.rand(3)
    y.sum().backward()
    return [y.detach(), x.grad, between, torch.rand(3)]


def selective(outer, policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(OUTER[outer], context_fn=contexts)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_inside(outer, inner, policy):
    found = gradient(selective(outer, policy), INNER[inner])
    same(found, gradient(plain, plain))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inner", INNER)
def test_a_checkpoint_inside_of_one_that_is_recorded(inner, policy):
    def fn(args, outer=None, inner=INNER[inner]):
        x = args.pop()
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = forward(outer or selective("cgpass", policy), inner, x)
            y.sum().backward()
        return [y.detach(), x.grad]

    x = tensor(3, 5)
    graph, outputs = SimulatedDriver().record(fn, [x], opaque=False)
    for seed in range(3):
        torch.manual_seed(seed)
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3)]
        torch.manual_seed(seed)
        same(found, [*fn([x], plain, plain), torch.rand(3)])
