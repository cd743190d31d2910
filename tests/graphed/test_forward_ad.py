"""Forward-mode AD inside of a callable, where some tensors stand for zeros and have no memory."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.graphed.steps import check, same_grads, twins


def by_dual_numbers(fn, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(fn(dual)).tangent + 0


WAYS = {
    "dual numbers": by_dual_numbers,
    "hessian": lambda fn, x: torch.vmap(torch.func.hessian(lambda v: fn(v).sum()))(x).sum(-1),
}


class Differentiated(torch.nn.Module):
    """Some way to differentiate a layer, and the layer."""

    def __init__(self, way):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.way = way

    def run(self, x):
        return self.linear(x).tanh()

    def forward(self, x):
        return self.way(self.run, x) + self.linear(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_inside(setting, way):
    module, plain = twins(setting, Differentiated(WAYS[way]))
    graphed = setting.graphed(module, (setting.randn(3, 4, grad=True),))
    check(setting, graphed, plain, setting.randn(3, 4, grad=True))
    same_grads(module, plain)
    assert graphed.graphed.stats.replays == 6
