"""What tests of training functions share: functions whose node is made one way or the other."""

import torch

import cgpass
from cgpass import torch_private

OPTIONS = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}


def maker(kind, monkeypatch):
    """What compiles; the function's node is made one way or the other."""
    if kind == "function":
        monkeypatch.setattr(torch_private, "autograd_is_plain", lambda: False)

    def make(fn, *args, calls=3, **settings):
        compiled = torch.compile(fn, backend=cgpass.cgpass, options=OPTIONS, **settings)
        for _ in range(calls):  # the backward is compiled, and both are recorded
            results = compiled(*args)
            first = results[0] if isinstance(results, tuple) else results
            inputs = [a for a in args if a.requires_grad]
            torch.autograd.grad(first.sum(), inputs, allow_unused=True)
        return compiled

    make.is_node = kind == "node"
    yield make
    torch.compiler.reset()


def randn(*size):
    return torch.randn(*size, requires_grad=True)
