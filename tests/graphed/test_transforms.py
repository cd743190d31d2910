"""Transforms that a replay knows nothing of: calls inside of them run without a graph."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.graphed.steps import same


def jvp_of(fn, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
        lambda fn, x: torch.vmap(fn)(torch.stack([x, 2 * x])),
        lambda fn, x: torch.func.jacrev(fn)(x),
        lambda fn, x: torch.func.jvp(fn, (x,), (x,))[1],
        lambda fn, x: jvp_of(fn, x, 2 * x),
    ],
    ids=["grad", "vmap", "jacrev", "jvp", "dual"],
)
def test_transforms(setting, grad, way, caplog):
    graphed = setting.graphed(torch.sin, (setting.randn(3, grad=grad),))
    x = setting.randn(3)
    same(way(graphed, x), way(torch.sin, x))
    assert "sin runs without a graph: a transform of torch.func or forward-mode AD" in caplog.text
    assert graphed.stats.replays == 0
    same(graphed(x), x.sin())
    assert graphed.stats.replays == 1
