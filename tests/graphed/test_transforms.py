"""Transforms, tracers and modes that a replay knows nothing of: calls inside of them run without a graph."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from cgpass.errors import GraphedArgumentError
from tests.graphed.steps import check, graphed_twins, net, same, same_grads, twins


def jvp_of(fn, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent))).tangent


class Doubles(TorchFunctionMode):
    """Doubles what linear layers return, as fake quantisation changes it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        factor = 2 if func is torch.nn.functional.linear else 1
        return func(*args, **(kwargs or {})) * factor


TRANSFORMS = {
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "vmap": lambda fn, x: torch.vmap(fn)(torch.stack([x, 2 * x])),
    "jacrev": lambda fn, x: torch.func.jacrev(fn)(x),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (x,))[1],
    "dual": lambda fn, x: jvp_of(fn, x, 2 * x),
}


@pytest.mark.parametrize("way", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(setting, way, caplog):
    graphed = setting.graphed(torch.sin, (setting.randn(3, grad=True),))
    x = setting.randn(3)
    same(way(graphed, x), way(torch.sin, x))
    assert "sin runs without a graph: a transform, a tracer or" in caplog.text
    assert graphed.stats.replays == 0
    same(graphed(x), x.sin())
    assert graphed.stats.replays == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export(setting, strict):
    graphed, _, plain = graphed_twins(setting, net(), grad=False)
    x = setting.randn(4, 8)
    exported = torch.export.export(graphed, (x,), strict=strict)
    same(exported.module()(x), plain(x))
    assert list(exported.state_dict) == list(plain.state_dict())


def test_dispatch_modes(setting, caplog):
    graphed, _, plain = graphed_twins(setting, net(), grad=False)
    x = setting.randn(4, 8)
    counts = []
    for fn in (graphed, plain):
        with FlopCounterMode(display=False) as counter:
            fn(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert "a mode of torch's is active, and would not see a replay" in caplog.text
    assert graphed.graphed.stats.replays == 0
    with Doubles():
        same(graphed(x), plain(x))
        with pytest.raises(GraphedArgumentError, match="a TorchFunctionMode is active"):
            setting.graphed(torch.sin, (x,))
    with torch.device(setting.device):  # a mode of functions, too
        same(graphed(x), plain(x))
    assert graphed.graphed.stats.replays == 1
    doubled = setting.graphed(lambda x: x * 2, (x,))
    same(make_fx(doubled)(x)(x + 1), (x + 1) * 2)


def test_forward_mode_inside(setting):
    """Some of its tensors stand for zeros and have no memory."""
    module, plain = twins(setting, net())

    def of(layer):
        return lambda x: jvp_of(layer, x, torch.ones_like(x)) + layer(x)

    sample = (setting.randn(4, 8, grad=True),)
    graphed = setting.graphed(of(module), sample, modules=(module,))
    check(setting, graphed, of(plain), 3)
    same_grads(module, plain)
    assert graphed.stats.replays == 6


def test_batched_gradients_are_refused(setting):
    graphed = setting.graphed(torch.sin, (setting.randn(3, grad=True),))
    x = setting.randn(3, grad=True)
    y, rows = graphed(x), torch.eye(3, device=setting.device)
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.autograd.grad(y, x, rows, is_grads_batched=True)
    same(torch.autograd.grad(graphed(x), x, rows[0])[0], x.cos() * rows[0])


def test_backwards_that_compiled_autograd_traces(setting):
    """Its setting is on when the forward runs, and a compiled function calls the backward."""
    graphed, module, plain = graphed_twins(setting, net())
    head = setting.module(torch.nn.Linear(8, 1))

    def tail(h):
        head(h).sum().backward()

    x = setting.randn(4, 8, grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(tail, backend="eager")(graphed(x))
    tail(plain(x))
    same_grads(module, plain)
    torch.compiler.reset()
