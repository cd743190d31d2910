"""Tensors that a backward leaves where no replay would put its own."""

import pytest
import torch

from tests.graphed.steps import same, step, twins


class Noting(torch.nn.Module):
    """Keeps the norm of a gradient, as for logging."""

    def __init__(self, where):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.where = where
        self.norms = {}
        self.register_buffer("norm", torch.zeros(()), persistent=False)

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.note)
        return y.tanh()

    def note(self, gradient):
        if self.where == "last":
            self.last = gradient.norm()
        elif self.where == "norms":
            self.norms["last"] = gradient.norm()
        elif self.where == "norm":
            self.norm.copy_(gradient.norm())


@pytest.mark.parametrize("where", ["last", "norms"])
def test_tensors_that_a_backward_leaves_are_warned_about(setting, caplog, where):
    module = setting.module(Noting(where))
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    (message,) = [each.getMessage() for each in caplog.records]
    assert message.startswith(
        f"Noting puts a tensor into {where} of Noting when its backward runs, which no replay does. What is there may"
    )
    step(graphed, setting.randn(4, 8, grad=True))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["norm", "nowhere"])
def test_a_buffer_that_a_backward_writes_is_not(setting, caplog, where):
    module, plain = twins(setting, Noting(where))
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    same(module.norm, plain.norm)
    for _ in range(3):
        x = setting.randn(4, 8, grad=True)
        same(step(graphed, x)[0], step(plain, x)[0])
        same(module.norm, plain.norm)
    assert not caplog.records
