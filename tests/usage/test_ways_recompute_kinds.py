"""Kinds of models with random operators under activation checkpointing, against eager PyTorch."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.usage.programs import Session, assert_replays
from tests.usage.test_ways_recompute import RNG, Masks, OneMask, compare, trained


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return F.dropout(self.fc(x), 0.5).sin()


class CheckpointedPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Part()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedPart() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def regions(find):
    """A program: what `find` names in each layer is compiled by itself."""

    def program(session):
        module = session.module(Layers)
        if type(session) is Session:
            for layer in module.layers:
                find(layer).compile(backend=session.backend, options=session.options)
        values = []
        for x in session.batches(4, 16):
            out = module(x)
            out.square().sum().backward()
            values += [out.detach(), *(p.grad.clone() for p in module.parameters())]
            module.zero_grad()
        return values

    return program


@pytest.mark.parametrize("rng", RNG)
def test_layers_that_share_a_compiled_region(way, rng):
    assert_replays(compare(way, regions(lambda layer: layer), rng=rng))


def test_checkpoints_outside_of_compiled_regions(way):
    """What is recomputed is a call of the compiled region."""
    assert_replays(compare(way, regions(lambda layer: layer.inner)))


class Attention(nn.Module):
    def __init__(self, dropout_p):
        super().__init__()
        self.fc, self.dropout_p = nn.Linear(16, 16), dropout_p

    def part(self, x):
        q = self.fc(x).view(1, 2, -1, 8)
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout_p).reshape(x.shape)
        return F.dropout(x, 0.2)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention(way, dropout_p):
    assert_replays(compare(way, trained(lambda: Attention(dropout_p))))


class TwoOutputs(nn.Module):
    """The mask that an operator returns is an output beside its values."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def part(self, x):
        x, mask = torch.native_dropout(self.fc(x), 0.5, True)
        return x.sin() * mask

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def part(self, x):
        return F.dropout(self.fc(x), 0.5).sin()

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return checkpoint(self.part, x, use_reentrant=False).float()


@pytest.mark.parametrize("make", [TwoOutputs, Autocast], ids=lambda make: make.__name__)
def test_one_operator(way, make):
    assert_replays(compare(way, trained(make)))


class Unread(nn.Module):
    """Draws what nobody reads, which torch.compile leaves out: eager's numbers are others."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def part(self, x):
        x = F.dropout(self.fc(x), 0.5)
        torch.rand_like(x)
        return F.dropout(x.sin(), 0.5), F.dropout(x, 0.3)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)[0]


class NotPreserved(nn.Module):
    """Draws anew in the backward in eager, and repeats the forward's numbers where torch.compile traces it."""

    def forward(self, x):
        part = lambda x: F.dropout(x.sin() + 2, 0.5) * 3  # noqa: E731
        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("rng", RNG)
def test_numbers_that_nobody_reads(way, rng):
    assert_replays(way.compare(trained(Unread), rng=rng))


def test_a_state_that_is_not_to_be_preserved_is_all_the_same(way):
    _, call = way.session(min_partition_ops=1).compiled(NotPreserved)
    for _ in range(5):
        x = torch.randn(64, 64, device=way.device).requires_grad_()
        out = call(x)
        out.sum().backward()
        assert torch.equal(out != 0, x.grad != 0)


@pytest.mark.parametrize("rng", RNG)
def test_sizes_are_symbols(way, rng):
    def program(session):
        module = session.module(Masks)
        call = session.compile(module, dynamic=True) if type(session) is Session else module
        values = []
        for number in range(12):
            out = call(session.randn((4, 7, 40)[number % 3], 16))
            out.square().sum().backward()
            values += [out.detach(), module.first.weight.grad.clone()]
        return values

    assert_replays(compare(way, program, rng=rng))


def test_calls_without_gradients_in_between(way):
    def program(session):
        module, call = session.compiled(Masks)
        values = []
        for number, x in enumerate(session.batches(4, 16, count=10)):
            out = call(x)
            if number % 2:
                with torch.no_grad():
                    values.append(call(x))
            if number % 3 == 0:
                with torch.inference_mode():
                    values.append(call(x).clone())
            out.square().sum().backward()
            values += [out.detach(), module.first.weight.grad.clone()]
        return values

    compare(way, program)


@pytest.mark.parametrize("rng", RNG)
def test_a_copy_and_a_reset(way, rng):
    def program(session):
        _, call = session.compiled(Masks)
        calls, values = [call], []
        for number, x in enumerate(session.batches(4, 16, count=8)):
            if number == 3:
                calls.append(copy.deepcopy(call))
            if number == 5:
                torch.compiler.reset()
            for call in calls:
                out = call(x)
                out.square().sum().backward()
                values += [out.detach(), next(call.parameters()).grad.clone()]
        return values

    compare(way, program, rng=rng)


def test_threads_at_the_same_time(way):
    """Where generators count draws, threads that draw from one at once need numbers of their own: "paired"."""
    rng = RNG if way.device.type == "cpu" else ("paired",)
    for mode in rng:
        _, call = way.session(rng=mode, min_partition_ops=1).compiled(OneMask)
        call(torch.ones(64, 64, device=way.device, requires_grad=True)).sum().backward()
        wrong = []

        def work(call=call, wrong=wrong):
            for _ in range(15):
                x = torch.ones(64, 64, device=way.device, requires_grad=True)
                out = call(x)
                call(x)
                out.sum().backward()
                wrong.append(not torch.equal(out != 0, x.grad != 0))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wrong) == 60
        assert not any(wrong)
        torch.compiler.reset()
