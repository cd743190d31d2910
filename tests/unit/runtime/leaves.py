"""A function whose node leads to leaves and, behind another operator, to an input; to which leaves autograd comes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgpass.runtime import fast

NUM = 4
ALL, ONE, TWO = NUM + 1, 2, 3
"""Counts of leaves that autograd's engine comes to: with the input, all; one for its stream; one more."""


def visits(backward, *args, **kwargs):
    """To how many leaves autograd's engine comes in a backward."""
    with torch.autograd.profiler.profile(acc_events=True) as found:
        backward(*args, **kwargs)
    visit = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    return sum(event.name == visit for event in found.function_events)


def randn(seed):
    return torch.randn(3, generator=torch.Generator().manual_seed(seed))


class Function:
    """Gradients are as given; that of the input comes after those of the leaves."""

    def __init__(self, leaves=None, gradients=None):
        self.leaves = leaves or [randn(n).requires_grad_() for n in range(NUM)]
        self.gradients = gradients or [randn(10 + n) for n in range(len(self.leaves))]
        self.saved = [torch.ones(3)]
        self.made = []

    def __call__(self):
        x = torch.zeros(3, requires_grad=True)
        self.behind = behind = x.clone()
        out, positions = [torch.ones(3)], tuple(range(len(self.leaves) + 1))
        inputs = (*self.leaves, behind)
        fast.attach(self.run, (), inputs, positions, out, (0,), self.saved, [], "Node")
        self.fn = out[0].grad_fn
        return out[0]

    def run(self, rest, saved, grads):
        saved.clear()
        grads.clear()
        made = [None if g is None else g.clone() for g in self.gradients]
        self.made = [0 if g is None or g.is_sparse else g.data_ptr() for g in made]
        return [*made, torch.zeros(3)]

    def grads(self):
        return [leaf.grad for leaf in self.leaves]


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
