"""`parameter_grads="direct"`: the function adds gradients to `.grad` itself; all else is as with autograd's nodes."""

import copy

import pytest
import torch
from torch import nn

from cgpass.runtime import node
from tests.usage import programs
from tests.usage.programs import MLP

DIRECT = {"parameter_grads": "direct"}


@pytest.fixture(autouse=True)
def compiled_node():
    if not node.wait():
        pytest.skip("no C++ compiler")


def trained(session, module, call, steps=8, *, set_to_none=True, microbatches=1):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    values = []
    for _ in range(steps):
        for batch in session.batches(4, 8, count=microbatches):
            loss = call(batch).square().mean()
            loss.backward()
            values.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return values + programs.state(module)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(way, set_to_none, microbatches):
    def program(session):
        module, call = session.compiled(MLP)
        return trained(session, module, call, set_to_none=set_to_none, microbatches=microbatches)

    counters = way.compare(program, **DIRECT)
    assert counters["replays"] > counters["warmups"], counters


def made(way):
    """The same module twice, compiled and not, after some calls."""
    session = way.session(**DIRECT)
    module = session.module(MLP)
    plain = copy.deepcopy(module)
    call = session.compile(module)
    for _ in range(4):
        call(session.randn(4, 8)).sum().backward()
        module.zero_grad()
    return session, plain, module, call


def same(plain, module):
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_there_are_no_edges_to_parameters(way):
    session, _, module, call = made(way)
    x = session.randn(4, 8).requires_grad_()
    call(x).sum().backward()  # compiled again, for such an input
    assert len(call(x).grad_fn.next_functions) == 1
    next(module.parameters()).register_hook(lambda grad: grad)
    assert len(call(x).grad_fn.next_functions) == 2


def test_hooks_on_a_parameter_leave_it_to_autograd(way):
    session, plain, module, call = made(way)
    seen = []
    for each in (plain, module):
        first, second, *_ = each.parameters()
        first.register_hook(lambda grad: grad * 2)
        second.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    x = session.randn(4, 8)
    for fn in (plain, call):
        for _ in range(2):
            fn(x).square().sum().backward()
    assert len(seen) == 4
    same(plain, module)


def test_backwards_into_named_inputs_leave_parameters_alone(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8).requires_grad_()
    y = x.detach().clone().requires_grad_()
    plain(x).square().sum().backward(inputs=[x])
    call(y).square().sum().backward(inputs=[y])
    torch.testing.assert_close(x.grad, y.grad)
    assert all(p.grad is None for p in module.parameters())
    (grad,) = torch.autograd.grad(call(y).square().sum(), y)
    torch.testing.assert_close(grad, y.grad)
    assert all(p.grad is None for p in module.parameters())


def test_parameters_are_out_of_reach_for_autograd_grad(way):
    session, _, module, call = made(way)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(call(session.randn(4, 8)).sum(), list(module.parameters()))


def test_parameters_that_are_frozen_before_the_backward(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8)
    for fn, each in ((plain, plain), (call, module)):
        loss = fn(x).square().sum()
        frozen, *others = each.parameters()
        frozen.requires_grad_(False)
        loss.backward()
        assert frozen.grad is None
        assert all(p.grad is not None for p in others)


def test_two_backwards_add_up_twice(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8)
    for fn in (plain, call):
        loss = fn(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same(plain, module)


def test_parameters_that_are_used_elsewhere_too(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8)
    for fn, each in ((plain, plain), (call, module)):
        penalty = sum(p.square().sum() for p in each.parameters())
        (fn(x).square().sum() + penalty).backward()
    same(plain, module)


def test_gradients_are_the_users_own(way):
    """Kept over calls, and of the parameters' layouts."""
    session, plain, module, call = made(way)
    kept = []
    for _ in range(4):
        x = session.randn(4, 8)
        for fn, each in ((plain, plain), (call, module)):
            each.zero_grad()
            fn(x).square().sum().backward()
        pairs = zip(plain.parameters(), module.parameters(), strict=True)
        kept.append([(a.grad, b.grad) for a, b in pairs])
    for pairs in kept:
        for a, b in pairs:
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_tied_and_frozen_parameters(way):
    def program(session):
        module = session.module(Tied)
        module.first.bias.requires_grad_(False)
        values = trained(session, module, session.compile(module))
        assert module.first.bias.grad is None
        return values

    way.compare(program, **DIRECT)
