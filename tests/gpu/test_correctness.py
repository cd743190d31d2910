"""What graphs usually break, on CUDA: compared bit for bit with the run without graphs."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cgpass
from tests.gpu import harness

pytestmark = harness.MARKS
BOTH = pytest.mark.parametrize("compiler", ["inductor", "eager"])


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x):
        shape = (*x.shape[:2], 3, 4, x.shape[2] // 4)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(mixed), self.dropout, self.training)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.block = Block()
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return F.cross_entropy(
            self.head(self.block(self.embedding(ids))).flatten(0, 1), ids.view(-1)
        )


class ConvNet(nn.Module):
    """Batch norm: buffers that the forward changes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )

    def forward(self, x):
        return self.body(x).square().mean()


class Synchronises(nn.Module):
    """Reads a value on the host between two parts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())

    def forward(self, x):
        x = self.first(x)
        rows = torch.nonzero(x.detach().sum(-1) > 0).shape[0]
        return (self.second(x) * (rows + 1)).square().mean()


class Loss(nn.Module):
    """Mean square of a module's output."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).square().mean()


def rows(*shape):
    return lambda generator: (torch.randn(*shape, generator=generator),)


def build(make):
    torch.manual_seed(harness.SEED)
    return make()


def graphs_and_plain(master, data, *, compiler, **kwargs):
    def with_driver(**driver):
        return lambda module: harness.cgpass_compile(module, compiler=compiler, **driver)

    with harness.deterministic():
        ours = harness.train(master, with_driver(), data, **kwargs)
        plain = harness.train(master, with_driver(driver="none"), data, **kwargs)
        control = harness.train(master, with_driver(driver="none"), data, **kwargs)
    harness.assert_same(ours, plain, control)
    return ours


@BOTH
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "make_batch"),
    [
        (lambda: Loss(Block()), rows(2, 16, 32)),
        (lambda: Loss(Block(dropout=0.2)), rows(2, 16, 32)),
        (Tied, harness.tokens(64, (2, 16))),
        (ConvNet, rows(4, 3, 12, 12)),
    ],
    ids=["block", "dropout", "tied", "batchnorm"],
)
def test_training(make, make_batch, compiler, amp):
    ours = graphs_and_plain(build(make), harness.batches(make_batch), compiler=compiler, amp=amp)
    harness.assert_replayed(ours.counters, captured=2)


@BOTH
def test_dynamic_shapes(compiler):
    sizes = [8, 16, 24, 8, 16, 24, 8, 16, 24, 8, 16, 24]
    data = [tuple(torch.randn(2, n, 32, device=harness.DEVICE) for _ in "x") for n in sizes]
    ours = graphs_and_plain(build(lambda: Loss(Block())), data, compiler=compiler)
    counters = ours.counters
    assert counters["plain_calls"] == 0
    assert counters["replays"] == counters["calls"] - counters["warmups"]
    assert counters["recordings"] >= 6, counters
    assert counters["replays"] >= counters["calls"] // 2, counters


@BOTH
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_host_read_in_the_middle_splits_the_graph(compiler):
    data = harness.batches(rows(16, 32))
    ours = graphs_and_plain(build(Synchronises), data, compiler=compiler)
    counters = ours.counters
    assert counters["partitions_eager"] >= 1, cgpass.summary()
    assert counters["partitions_captured"] >= 2, cgpass.summary()
    assert counters["plain_calls"] == 0, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0, counters


def on_device(make, **options):
    """A fresh module and its compiled form."""
    harness.fresh()
    module = build(make).to(harness.DEVICE).train()
    return module, harness.cgpass_compile(module, **options)


def both_drivers(program, **options):
    """Results of a program with and without graphs, and the counters of the former."""
    with harness.deterministic():
        with harness.counted() as counters:
            ours = program(**options)
        plain = program(**options, driver="none")
    assert len(ours) == len(plain)
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(a, b), f"value {index} differs by {(a - b).abs().max()}"
    return counters


def steady(counters):
    assert counters["partitions_captured"] >= 1, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0, counters
    assert counters["plain_calls"] == 0, counters


def held_outputs(**options):
    module, call = on_device(Block, **options)
    xs = [x for (x,) in harness.batches(rows(2, 16, 32), count=8)]
    held, grads = [], []
    for x in xs:
        out = call(x)
        out.square().sum().backward()
        held += [out.detach(), out.detach()[0]]
        grads += [parameter.grad for parameter in module.parameters()]
        module.zero_grad(set_to_none=True)
    return held + grads


def forwards_before_backwards(order):
    def program(**options):
        module, call = on_device(lambda: Loss(Block(dropout=0.1)), **options)
        xs = [x for (x,) in harness.batches(rows(2, 16, 32), count=9)]
        torch.manual_seed(harness.SEED)
        values = []
        for first in (0, 3, 6):
            losses = [call(x) for x in xs[first : first + 3]]
            for index in order:
                losses[index].backward()
            values += [parameter.grad.clone() for parameter in module.parameters()]
            values += [loss.detach() for loss in losses]
        return values

    return program


def accumulation(**options):
    module, call = on_device(lambda: Loss(Block()), **options)
    values = []
    for index, (x,) in enumerate(harness.batches(rows(2, 16, 32), count=12)):
        (call(x) / 4).backward()
        if index % 4 == 3:
            values += [parameter.grad.clone() for parameter in module.parameters()]
            module.zero_grad(set_to_none=index > 4)
    return values


def dropped_forwards(**options):
    module, call = on_device(lambda: Loss(Block()), **options)
    values = []
    for index, (x,) in enumerate(harness.batches(rows(2, 16, 32), count=10)):
        loss = call(x)
        if index % 3 != 1:
            loss.backward()
        values.append(loss.detach())
    return values + [parameter.grad for parameter in module.parameters()]


def retained_graph(**options):
    module, call = on_device(lambda: Loss(Block()), **options)
    for (x,) in harness.batches(rows(2, 16, 32), count=6):
        loss = call(x)
        loss.backward(retain_graph=True)
        loss.backward()
    return [parameter.grad for parameter in module.parameters()]


def input_gradients(**options):
    _, call = on_device(lambda: Loss(Block()), **options)
    values = []
    for (x,) in harness.batches(rows(2, 16, 32), count=6):
        x.requires_grad_()
        call(x).backward()
        values.append(x.grad)
    return values


@BOTH
@pytest.mark.parametrize(
    "program",
    [
        held_outputs,
        forwards_before_backwards((0, 1, 2)),
        forwards_before_backwards((2, 0, 1)),
        accumulation,
        dropped_forwards,
        retained_graph,
        input_gradients,
    ],
    ids=["held", "in-order", "out-of-order", "accumulation", "dropped", "retain", "input-grads"],
)
def test_what_is_held_stays(program, compiler):
    steady(both_drivers(program, compiler=compiler))


def replaced_parameters(**options):
    module, call = on_device(lambda: Loss(Block()), **options)
    states = [copy.deepcopy(module.state_dict()) for _ in range(2)]
    for value in states[1].values():
        value.mul_(0.5)
    values = []
    for index, (x,) in enumerate(harness.batches(rows(2, 16, 32), count=12)):
        module.load_state_dict(states[index // 2 % 2], assign=True)
        module.zero_grad(set_to_none=True)
        loss = call(x)
        loss.backward()
        values += [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]
    return values


@BOTH
def test_replaced_parameters(compiler):
    counters = both_drivers(replaced_parameters, compiler=compiler)
    assert counters["replays"] > 0, counters
    assert counters["recordings"] > counters["partitions_captured"], counters


def test_more_than_may_be_copied_runs_without_a_graph():
    def program(**options):
        module, call = on_device(lambda: Loss(Block()), **options)
        values, kept = [], []
        for (x,) in harness.batches(rows(2, 16, 32), count=12):
            for parameter in module.parameters():
                kept.append(parameter.data)
                parameter.data = parameter.data.clone()
            with torch.no_grad():
                values.append(call(x))
        return values

    counters = both_drivers(program, compiler="eager", max_copied_mib=0)
    assert counters["recordings"] == 0, counters
    counters = both_drivers(program, compiler="eager")
    assert counters["recordings"] == counters["partitions_captured"], counters
    assert counters["plain_calls"] == 0, counters


def in_place(**options):
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(32))

        def forward(self, x, state):
            self.seen.add_(x.detach().mean((0, 1)))
            state.mul_(0.5).add_(x.detach().sum())
            return (x * self.seen).sum(-1) + state.sum()

    module, call = on_device(Count, **options)
    state = torch.ones(4, device=harness.DEVICE)
    outs = [call(x, state) for (x,) in harness.batches(rows(2, 16, 32), count=8)]
    return [*outs, module.seen, state]


@BOTH
def test_mutated_buffers_and_inputs_are_written_back(compiler):
    steady(both_drivers(in_place, compiler=compiler))


def seeded_twice(**options):
    _module, call = on_device(lambda: Block(dropout=0.5), **options)
    x = torch.ones(2, 16, 32, device=harness.DEVICE)
    values = []
    for _ in range(4):
        torch.manual_seed(3)
        values += [call(x).detach(), call(x).detach()]
        values.append(torch.rand(4, device=harness.DEVICE))
    assert torch.equal(values[3], values[9])
    assert not torch.equal(values[6], values[7])
    return values


@BOTH
def test_random_numbers_follow_the_seed(compiler):
    steady(both_drivers(seeded_twice, compiler=compiler))


@pytest.mark.skipif(harness.DEVICE.type != "cuda", reason="needs 1 CUDA device(s), found 0")
def test_memory_does_not_grow_and_comes_back():
    harness.fresh()
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    module, call = on_device(lambda: Loss(Block(width=256)), compiler="eager")
    seen = []
    for (x,) in harness.batches(rows(8, 64, 256), count=40):
        module.zero_grad(set_to_none=True)
        call(x).backward()
        del x
        seen.append(torch.cuda.memory_reserved())
    assert max(seen[8:]) <= seen[8], seen
    del module, call
    harness.fresh()
    gc.collect()
    torch.cuda.empty_cache()
    slack = 32 * 2**20  # cuBLAS workspaces stay
    assert torch.cuda.memory_reserved() <= start + slack
