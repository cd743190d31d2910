"""Random trees of nested checkpoints: bitwise plain eager, run as they are and replayed from a simulated graph."""

import os
import random

import pytest
import torch
import torch.nn.functional as F

import cgpass
from cgpass.runtime.simulated import SimulatedDriver
from tests.recompute.steps import plain, same, tensor

OPS = {
    "sin": lambda x, w: x.sin(),
    "exp": lambda x, w: (x * 0.1).exp(),
    "dropout": lambda x, w: F.dropout(x, 0.3),
    "product": lambda x, w: x * x.cos(),
    "linear": lambda x, w: torch.tanh(x @ w),
    "in place": lambda x, w: (x * 1).mul_(0.5).sin_(),
    "cat": lambda x, w: torch.cat([x, F.dropout(x, 0.5)])[:4],
}
NUM_PROGRAMS = int(os.environ.get("CHECKPOINT_RANDOM_PROGRAMS", "24"))


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


def step(seed, checkpoint):
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


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_nested_checkpoints(seed):
    fn, inputs = step(seed, cgpass.checkpoint)
    graph, outputs = SimulatedDriver().record(fn, inputs, opaque=False)
    for start in (0, 1):
        found = []
        for compute in (step(seed, plain)[0], fn, lambda args: graph.replay() or outputs):
            torch.manual_seed(start)
            results = [value.clone() for value in compute([])]
            found.append([*results, torch.rand(3)])
        same(found[0], found[1])
        same(found[0], found[2])
