"""Checkpoints as they are and replayed from simulated graphs: bitwise plain eager, random numbers included."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from cgpass.runtime.simulated import SimulatedDriver
from tests.recompute.steps import plain, same, tensor

aten = torch.ops.aten
OPS = {
    "sin": lambda x, w: x.sin(),
    "exp": lambda x, w: (x * 0.1).exp(),
    "dropout": lambda x, w: F.dropout(x, 0.3),
    "product": lambda x, w: x * x.cos(),
    "linear": lambda x, w: torch.tanh(x @ w),
    "in place": lambda x, w: (x * 1).mul_(0.5).sin_(),
    "cat": lambda x, w: torch.cat([x, F.dropout(x, 0.5)])[:4],
}


def tree(rng, depth):
    """An operator's name, or whether it is a checkpoint with its parts."""
    kind = rng.choice(["op", "op", "checkpoint", "checkpoint", "checkpoint", "sequence"])
    if depth == 0 or kind == "op":
        return rng.choice(list(OPS))
    return kind == "checkpoint", [tree(rng, depth - 1) for _ in range(rng.randint(1, 4))]


def run(node, x, w, checkpoint):
    if isinstance(node, str):
        return OPS[node](x, w)
    checkpointed, parts = node

    def body(x, *, w):
        for part in parts:
            x = run(part, x, w, checkpoint)
        return x

    return checkpoint(body, x, w=w) if checkpointed else body(x, w=w)


def program(seed, checkpoint):
    """Several forwards, their backwards in another order; a function of a list, and its inputs."""
    rng = random.Random(seed)
    trees = [tree(rng, 4) for _ in range(rng.randint(1, 3))]
    order, twice = rng.sample(range(len(trees)), len(trees)), rng.random() < 0.4
    x, w = tensor(4, 4, seed=seed), tensor(4, 4, seed=seed + 1)

    def fn(args):
        args.clear()
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
            ys = [
                run(node, leaves[0] * (i + 1), leaves[1], checkpoint).sum()
                for i, node in enumerate(trees)
            ]
            for i in order:
                if twice:
                    ys[i].backward(retain_graph=True)
                ys[i].backward()
        grads = [torch.zeros(1) if leaf.grad is None else leaf.grad for leaf in leaves]
        return [*(y.detach() for y in ys), *grads]

    return fn, [x, w]


def same_results(ways, *args):
    """Also of the random numbers behind them."""
    for seed in range(3):
        found = []
        for way in ways:
            torch.manual_seed(seed)
            found.append([*(value.clone() for value in way([*args])), torch.rand(3)])
        for other in found[1:]:
            same(found[0], other)


@pytest.mark.parametrize("seed", range(24))
def test_replays_are_bitwise_eager(seed):
    fn, inputs = program(seed, cgpass.checkpoint)
    graph, outputs = SimulatedDriver().record(fn, inputs, opaque=False)
    same_results([program(seed, plain)[0], fn, lambda args: graph.replay() or outputs])


RECOMPUTED = {
    "save by default": (aten.sin.default, aten.cos.default),
    "save all but random": (aten.rand_like.default,),
    "recompute by default": None,
}
OUTER = {"cgpass": cgpass.checkpoint, "torch": functools.partial(torchs, use_reentrant=False)}


def block(x):
    return (x.sin() * torch.rand_like(x)).cos()


def step(args, checkpoint, fn):
    """A forward and its backward as a function of a list of one tensor."""
    x = args.pop()
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = checkpoint(fn, x)
        y.sum().backward()
    return [y.detach(), x.grad]


def selective(outer, recomputed):
    def policy(ctx, op, *args, **kwargs):
        again = recomputed is None or op in recomputed or op._schema.is_mutable
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(OUTER[outer], context_fn=contexts)


@pytest.mark.parametrize("policy", RECOMPUTED)
@pytest.mark.parametrize("outer", OUTER)
def test_a_checkpoint_inside_of_a_selective_one(outer, policy):
    """As it is, and replayed from a recording."""

    def fn(x, inner):
        return inner(block, inner(block, x * torch.rand_like(x))).sin()

    around, x = selective(outer, RECOMPUTED[policy]), tensor(3, 5)
    checkpointed = functools.partial(fn, inner=cgpass.checkpoint)
    ours = functools.partial(step, checkpoint=around, fn=checkpointed)
    ways = [lambda args: step(args, plain, functools.partial(fn, inner=plain)), ours]
    if outer == "cgpass":
        graph, outputs = SimulatedDriver().record(ours, [x], opaque=False)
        ways.append(lambda args: graph.replay() or outputs)
    same_results(ways, x)
