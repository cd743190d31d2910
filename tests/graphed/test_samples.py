"""Samples that several callables were recorded with, each by a call of its own."""

import functools
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

import cgpass
from tests.graphed.steps import net, same, same_grads, twins


class Checkpointed(torch.nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.inner = net()
        self.checkpoint = checkpoint

    def forward(self, x):
        return self.checkpoint(self.inner, x)


class Product(torch.autograd.Function):
    """Keeps its arguments where autograd does not see them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.kept
        return grad @ weight, grad.t() @ x


class Kept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Product.apply(x, self.weight)


LAYERS = {
    "plain": net,
    "ours": lambda: Checkpointed(cgpass.checkpoint),
    "ours, reentrant": lambda: Checkpointed(
        functools.partial(cgpass.checkpoint, use_reentrant=True)
    ),
    "torch's": lambda: Checkpointed(
        functools.partial(torchs, use_reentrant=False, preserve_rng_state=False)
    ),
    "kept on ctx": Kept,
}


def copied_by_a_call_with(x, graphed):
    before = graphed.graphed.stats.copied_bytes
    with torch.no_grad():
        graphed(x)
    return graphed.graphed.stats.copied_bytes - before


@pytest.mark.parametrize("kind", LAYERS)
def test_one_sample_for_several_calls(setting, kind):
    pairs = [twins(setting, LAYERS[kind]()) for _ in range(3)]
    x = setting.randn(4, 8, grad=True)
    graphed = [setting.graphed(module, (x,)) for module, _ in pairs]
    for _ in range(2):
        start = setting.randn(4, 8)
        for layers in (graphed, [plain for _, plain in pairs]):
            h = start.clone().requires_grad_()
            for layer in layers:
                h = layer(h)
            h.square().sum().backward()
    for module, plain in pairs:
        same_grads(module, plain)


def test_only_the_first_reads_the_sample_where_it_lies(setting):
    x = setting.randn(4, 8)
    rows = x[:2]
    first, second = (setting.graphed(setting.module(net()), (sample,)) for sample in (x, rows))
    assert copied_by_a_call_with(x, first) == 0
    assert copied_by_a_call_with(rows, second) == rows.nbytes


@pytest.mark.parametrize("end", ["reset", "close", "drop"])
def test_a_sample_is_free_again_once_its_graphs_are_gone(setting, end):
    x = setting.randn(4, 8)
    first = setting.graphed(setting.module(net()), (x,))
    pending = first(x)
    if end == "drop":
        del pending
    else:
        getattr(first, end)()
    del first
    gc.collect()
    second = setting.graphed(setting.module(net()), (x,))
    assert copied_by_a_call_with(x, second) == 0


def test_a_callable_that_is_reset_leaves_its_sample_to_others(setting):
    x = setting.randn(4, 8)
    module, plain = twins(setting, net())
    first = setting.graphed(module, (x,))
    first.reset()
    second = setting.graphed(setting.module(net()), (x,))
    before = x.clone()
    y = setting.randn(4, 8)
    same(first(y), plain(y))
    same(x, before)
    assert copied_by_a_call_with(x, second) == 0


def test_a_sample_is_free_after_a_capture_that_failed(setting):
    """Though the error, which somebody may keep, holds the frames that it came through."""
    x = setting.randn(4, 8)
    with pytest.raises(cgpass.errors.CaptureError, match="can't be captured") as raised:
        setting.graphed(lambda x: x * x.sum().item(), (x,))
    second = setting.graphed(setting.module(net()), (x,))
    assert copied_by_a_call_with(x, second) == 0
    assert raised.tb is not None


@pytest.mark.parametrize("owner", ["graphed", "compiled"])
def test_a_sample_that_is_the_result_of_another_graph(setting, owner):
    """It is moved when that one is replayed, so it is not read where it lies."""
    first, plain_first = twins(setting, net())
    second, plain_second = twins(setting, net())
    x = setting.randn(4, 8)
    if owner == "graphed":
        before = setting.graphed(first, (x,))
    else:
        options = {"driver": setting.driver, "compiler": "eager", "min_partition_ops": 1}
        before = torch.compile(first, backend=cgpass.cgpass, options=options)
        for _ in range(3):
            before(x)
    sample = before(x).detach().requires_grad_()
    after = setting.graphed(second, (sample,))
    for _ in range(3):
        xs = setting.randn(2, 4, 8)
        losses = [after(before(x)).square().sum() for x in xs]
        wanted = [plain_second(plain_first(x)).square().sum() for x in xs]
        for a, b in zip(losses, wanted, strict=True):
            same(a, b)
            a.backward()
            b.backward()
        same_grads(first, plain_first)
        same_grads(second, plain_second)
    torch.compiler.reset()
