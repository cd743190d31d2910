"""Computations and comparisons of the tests of checkpoints."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from tests.graphed.steps import same


def plain(fn, *args, **kwargs):
    for name in ("use_reentrant", "determinism_check", "context_fn", "rng_tracker"):
        kwargs.pop(name, None)
    return fn(*args, **kwargs)


class Block(torch.nn.Module):
    """A layer with dropout twice."""

    def __init__(self, width=8):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x, *, scale=1.0):
        hidden = F.dropout(F.gelu(self.up(x)), 0.5)
        return x + scale * F.dropout(self.down(hidden), 0.25)


def tensor(*shape, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **kwargs)


def tracker_of(device="cpu", **seeds):
    tracker = cgpass.RNGStatesTracker(device)
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def blocks(count=3):
    torch.manual_seed(1)
    return torch.nn.ModuleList(Block() for _ in range(count))


def step(program, checkpoint, *, device="cpu", **kwargs):
    """Gradients, results and the random number state after `program(checkpoint, model, x)`."""
    model = blocks().to(device)
    x = tensor(4, 8).to(device).requires_grad_()
    torch.manual_seed(2)
    results = program(lambda fn, *a, **k: checkpoint(fn, *a, **kwargs, **k), model, x)
    found = [x.grad, *(p.grad for p in model.parameters())]
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    return [*found, *results, state]


def check(program, *, against=(torchs, plain), **kwargs):
    """`program` gives the same with our checkpoint as with torch's and with none."""
    kwargs.setdefault("use_reentrant", False)
    ours = step(program, cgpass.checkpoint, **kwargs)
    assert any(value is not None for value in ours[:-1])
    for way in against:
        same(ours, step(program, way, **kwargs))
