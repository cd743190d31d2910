"""A function whose node leads to leaves and, behind another operator, to an input; what its edges are meanwhile."""

import torch

from cgpass.runtime import node

NUM = 4
ALL = [True] * (NUM + 1)
"""Autograd's engine comes to each leaf."""
ONE = [True] + [False] * (NUM - 1) + [True]
"""All gradients but one were added before."""


def randn(seed):
    return torch.randn(3, generator=torch.Generator().manual_seed(seed))


class Function:
    """Gradients are as given; that of the input comes after those of the leaves."""

    def __init__(self, leaves=None, gradients=None, *, once=True, saved=()):
        self.leaves = leaves or [randn(n).requires_grad_() for n in range(NUM)]
        self.gradients = gradients or [randn(10 + n) for n in range(len(self.leaves))]
        self.once = once
        self.saved = list(saved)
        self.made = []
        self.looks = True
        self.seen = None

    def __call__(self):
        x = torch.zeros(3, requires_grad=True)
        self.behind = behind = x.clone()
        out, positions = [torch.ones(3)], tuple(range(len(self.leaves) + 1))
        inputs = (*self.leaves, behind)
        node.attach()(
            self.run, (), inputs, positions, (), out, (0,), self.saved, [], "Node", True, self.once
        )
        self.fn = out[0].grad_fn
        behind.register_hook(self.look)
        return out[0]

    def run(self, rest, saved, grads):
        saved.clear()
        grads.clear()
        made = [g.clone() for g in self.gradients]
        self.made = [0 if g.is_sparse else g.data_ptr() for g in made]
        return [*made, torch.zeros(3)]

    def look(self, gradient):
        """Whoever looks at edges holds the nodes where they lead, which then are not alone."""
        if self.looks:
            self.seen = [fn is not None for fn, _ in self.fn.next_functions]

    def grads(self):
        return [leaf.grad for leaf in self.leaves]
