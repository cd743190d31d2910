"""Random operators under activation checkpointing: each backward repeats its own forward's numbers, which are eager's."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.usage.programs import assert_replays, one_of_each_on_cpu

RNG = ("exact", "paired")


class Masks(nn.Module):
    """Two dropouts in each of two checkpoints, and plain ones before, between and after them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x):
        x = F.dropout(self.first(x), 0.5)
        return F.dropout(self.second(x).relu(), 0.3)

    def forward(self, x):
        x = checkpoint(self.part, F.dropout(x, 0.1), use_reentrant=False)
        x = checkpoint(self.part, F.dropout(x, 0.2), use_reentrant=False)
        return F.dropout(x, 0.1)


class Noise(nn.Module):
    """All kinds of random operators, nested checkpoints, a policy."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)

    def inner(self, x):
        x = x * torch.bernoulli(torch.full_like(x, 0.7))
        return (x @ self.weight).sin() + torch.rand_like(x)

    def middle(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False)
        order = torch.randperm(x.shape[0], device=x.device)
        return x * order.view(-1, 1) * torch.randint(1, 3, x.shape, device=x.device)

    def outer(self, x):
        q = (x + torch.normal(0.0, 1.0, x.shape, device=x.device)).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4).reshape(x.shape) + x

    def forward(self, x):
        x = checkpoint(self.middle, x, use_reentrant=False)
        return checkpoint(self.outer, x, use_reentrant=False) * self.weight[:4]


def policy(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


products_saved = functools.partial(create_selective_checkpoint_contexts, policy)


class Selective(nn.Module):
    """Saves matrix products and recomputes the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x):
        return F.dropout(self.second(F.dropout(self.first(x), 0.5)).relu(), 0.3)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False, context_fn=products_saved)


class AcrossPartitions(nn.Module):
    """Reads a number on the host between and inside checkpoints."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = checkpoint(lambda x: F.dropout(self.first(x).sin(), 0.5), x, use_reentrant=False)
        rows = torch.nonzero(x.detach().sum(-1) > 0).shape[0]
        noise = torch.rand(rows + 1, 16, device=x.device).sum(
            0
        )  # how much it draws depends on data
        x = checkpoint(lambda x: F.dropout(self.second(x).cos(), 0.5), x, use_reentrant=False)
        return x + noise


def compare(setting, program, **options):
    """With graphs and in eager PyTorch where the operators and numbers are the same, else without graphs."""
    exact = options.get("rng", "exact") == "exact"
    aten = options.get("compiler", setting.compiler) == "eager"
    return setting.compare(program, only_eager=exact and aten, **options)


def trained(make, *, shape=(4, 16), count=8, orders=None):
    """A program: forwards ahead of their backwards, in the orders given, then a step."""

    def program(session):
        module, call = session.compiled(make)
        values = []
        for number in range(count):
            order = (0,) if orders is None else orders[number % len(orders)]
            inputs = [x.requires_grad_() for x in session.batches(*shape, count=len(order))]
            outs = [call(x) for x in inputs]
            for which in order:
                outs[which].square().sum().backward()
                values.append(next(module.parameters()).grad.clone())
            values += [x.grad for x in inputs] + [out.detach() for out in outs]
            module.zero_grad(set_to_none=number % 2 == 0)
        return values

    return program


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize("make", [Masks, Noise, Selective], ids=lambda make: make.__name__)
def test_training_with_checkpoints(way, make, rng):
    one_of_each_on_cpu(way, another=rng == "paired" and make is not Noise)
    assert_replays(compare(way, trained(make), rng=rng))


@pytest.mark.parametrize("rng", RNG)
def test_pairs_in_several_partitions(way, rng):
    counters = compare(way, trained(AcrossPartitions), rng=rng, on_skip="silent")
    assert counters["replays"] > 0
    assert counters["plain_calls"] == 0


@pytest.mark.parametrize("rng", RNG)
def test_backwards_in_any_order(way, rng):
    orders = ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0,))
    counters = compare(way, trained(Masks, orders=orders, count=12), rng=rng)
    assert counters["plain_calls"] == 0


@pytest.mark.parametrize("rng", RNG)
def test_a_graph_is_used_twice_and_some_never(way, rng):
    def program(session):
        module, call = session.compiled(Masks)
        values = []
        for x in session.batches(4, 16, count=10):
            call(x * 2)
            out = call(x)
            loss = out.square().sum()
            loss.backward(retain_graph=True)
            once = module.first.weight.grad.clone()
            loss.backward()
            values += [once, module.first.weight.grad - once - once, out.detach()]
            module.zero_grad()
        return values

    compare(way, program, rng=rng)


class OneMask(nn.Module):
    def forward(self, x):
        return checkpoint(lambda x: F.dropout(x.sin() + 2, 0.5) * 3, x, use_reentrant=False)


@pytest.mark.parametrize("rng", RNG)
def test_a_gradient_is_there_exactly_where_the_output_is(way, rng):
    session = way.session(rng=rng, min_partition_ops=1)
    _, call = session.compiled(OneMask)
    seen = []
    for _ in range(12):
        x = torch.randn(64, 64, device=way.device).requires_grad_()
        other = torch.randn(64, 64, device=way.device).requires_grad_()
        out, out2 = call(x), call(other)
        out.sum().backward()
        out2.sum().backward()
        for mask, grad in ((out != 0, x.grad), (out2 != 0, other.grad)):
            assert torch.equal(mask, grad != 0)
            seen.append(mask.clone())
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])


@pytest.mark.parametrize("rng", RNG)
def test_a_seed_or_a_restored_state_fixes_every_step(way, rng):
    on_cuda = way.device.type == "cuda"
    get = torch.cuda.get_rng_state if on_cuda else torch.get_rng_state
    put = torch.cuda.set_rng_state if on_cuda else torch.set_rng_state
    module, call = way.session(rng=rng).compiled(Masks)
    x = torch.randn(4, 16, device=way.device)

    def step():
        module.zero_grad()
        out = call(x)
        out.square().sum().backward()
        return [out.detach().clone(), *(p.grad.clone() for p in module.parameters())]

    def same(a, b):
        return all(map(torch.equal, a, b))

    for seed in (5, 5, 7, 5):
        torch.manual_seed(seed)
        steps = [step() for _ in range(4)]
        if seed == 5:
            first = locals().get("first") or steps
            assert all(map(same, first, steps))
        assert not any(same(a, b) for n, a in enumerate(steps) for b in steps[:n])
    state = get()
    after = [step() for _ in range(3)]
    torch.rand(7, device=way.device)
    put(state)
    assert all(map(same, after, [step() for _ in range(3)]))
    with torch.random.fork_rng(devices=[way.device] if on_cuda else []):
        torch.manual_seed(5)
        assert same(first[0], step())
        torch.manual_seed(11)
    put(state)
    assert same(after[0], step())


@pytest.mark.parametrize("rng", RNG)
def test_a_resumed_training_goes_on_as_it_would_have(way, rng):
    on_cuda = way.device.type == "cuda"

    def program(session):
        module, call = session.compiled(Masks)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        batches, values = session.batches(4, 16, count=8), []

        def train(some):
            for x in some:
                optimizer.zero_grad()
                call(x).square().mean().backward()
                optimizer.step()

        train(batches[:4])
        saved = {name: value.clone() for name, value in module.state_dict().items()}
        state = torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()
        train(batches[4:])
        values += [value.clone() for value in module.state_dict().values()]
        module.load_state_dict(saved)
        torch.cuda.set_rng_state(state) if on_cuda else torch.set_rng_state(state)
        train(batches[4:])
        again = list(module.state_dict().values())
        assert all(map(torch.equal, values, again))
        return values

    compare(way, program, rng=rng)


def test_dropout_has_its_mean_and_never_repeats(way):
    _, call = way.session(min_partition_ops=1).compiled(OneMask)
    x = torch.zeros(256, device=way.device).requires_grad_()
    kept = torch.stack([call(x).detach() != 0 for _ in range(1000)]).float()
    assert abs(kept.mean().item() - 0.5) < 0.01
    assert (kept.mean(0) - 0.5).abs().max().item() < 0.1
    assert len({tuple(row.tolist()) for row in kept.bool()}) == 1000


def test_sizes_take_turns(way):
    """Each size has drawn another number of times when the operators of a checkpoint begin."""

    def program(session):
        module, call = session.compiled(Masks)
        values = []
        for number in range(12):
            out = call(session.randn((4, 7, 40)[number % 3], 16))
            out.square().sum().backward()
            values += [out.detach(), module.first.weight.grad.clone()]
        return values

    assert_replays(compare(way, program))


def test_threads_draw_their_own_numbers(way):
    """A forward of one thread stands between forward and backward of another."""

    def program(session):
        module, call = session.compiled(Masks)
        values = []
        for a, b in zip(*(session.batches(4, 16, count=5) for _ in range(2)), strict=True):
            out = call(a)
            with torch.no_grad():
                call(b)
            out.square().sum().backward()
            values += [out.detach(), module.second.weight.grad.clone()]
        return values

    compare(way, program)
