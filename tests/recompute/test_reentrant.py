"""What is particular to `use_reentrant=True`, and gradients taken by `backward`."""

import contextlib

import pytest
import torch

import cgpass
from cgpass.errors import CheckpointError
from cgpass.recompute.gradients import gradients, grads_put_aside
from tests.recompute.steps import Block, check, same, tensor


def test_parameters_accumulate_into_their_grad_in_place():
    torch.manual_seed(0)
    block = Block()
    x = tensor(2, 8)
    block.up.weight.grad = held = torch.ones_like(block.up.weight)
    torch.manual_seed(1)
    cgpass.checkpoint(block, x, use_reentrant=True).sum().backward()
    accumulated = block.up.weight.grad
    assert accumulated is held
    block.up.weight.grad = torch.ones_like(held)
    torch.manual_seed(1)
    block(x).sum().backward()
    assert torch.equal(accumulated, block.up.weight.grad)


def test_parameters_get_gradients_though_no_argument_requires_grad():
    def program(checkpoint, model, x):
        y = checkpoint(model[1], checkpoint(model[0], x.detach()))
        y.sum().backward()
        return [y.detach()]

    check(program, use_reentrant=True, against=("plain",))


def test_results_that_take_no_gradient():
    x = tensor(3, 4, requires_grad=True)
    values, places, count = cgpass.checkpoint(
        lambda x: (*x.sin().sort(), x.numel()), x, use_reentrant=True
    )
    assert (values.requires_grad, places.requires_grad, count) == (True, False, 12)
    values[:, 0].sum().backward()
    (grad,) = torch.autograd.grad(x.sin().sort()[0][:, 0].sum(), x)
    assert torch.equal(x.grad, grad)


def test_a_result_that_nobody_used():
    x = tensor(3, requires_grad=True)
    a, _ = cgpass.checkpoint(lambda x: (x.sin(), x.cos()), x, use_reentrant=True)
    a.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_an_argument_returned_as_it_is():
    x = tensor(3, requires_grad=True)
    same_x, y = cgpass.checkpoint(lambda x: (x, x.sin()), x, use_reentrant=True)
    (same_x * y).sum().backward()
    expected = x.detach().sin() + x.detach() * x.detach().cos()
    torch.testing.assert_close(x.grad, expected)


def test_a_frozen_function():
    x = tensor(3)
    y = cgpass.checkpoint(torch.sin, x, use_reentrant=True)
    assert y.requires_grad
    y.sum().backward()
    assert x.grad is None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_gradients_of_gradients_are_refused():
    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(torch.sin, x, use_reentrant=True).sum()
    with pytest.raises(CheckpointError, match="no gradients of gradients"):
        y.backward(create_graph=True)


def test_gradients_are_returned_and_existing_ones_put_back():
    torch.manual_seed(0)
    block = Block()
    x = tensor(2, 8, requires_grad=True)
    inputs = [x, *block.parameters(), tensor(3, requires_grad=True)]
    before = [None if i == 1 else torch.full_like(t, i) for i, t in enumerate(inputs)]
    for t, grad in zip(inputs, before, strict=True):
        t.grad = grad
    found = []
    for reentrant in (True, False):
        torch.manual_seed(1)
        y = cgpass.checkpoint(block, x, use_reentrant=reentrant)
        found.append(gradients([y], [torch.ones_like(y)], inputs))
        assert all(t.grad is grad for t, grad in zip(inputs, before, strict=True))
    torch.manual_seed(1)
    same(found[0], torch.autograd.grad(block(x).sum(), inputs, allow_unused=True))
    same(*found)
    assert found[0][-1] is None
    assert all(torch.equal(g, torch.full_like(g, i)) for i, g in enumerate(before) if i != 1)


def test_gradients_are_put_back_after_an_exception():
    x = tensor(3, requires_grad=True)
    x.grad = held = torch.ones(3)
    with contextlib.suppress(ZeroDivisionError), grads_put_aside([x]):
        assert x.grad is None
        raise ZeroDivisionError
    assert x.grad is held


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_forward_gets_the_callers_own_containers(reentrant):
    """A reentrant one got copies, and what it put into a cache was lost."""
    cache, seen = {"old": tensor(3, seed=1)}, []

    def fn(x, cache, seen):
        cache["new"] = x.detach() * 2
        seen.append(cache["old"])
        return (x * cache["old"]).sin()

    x = tensor(3, requires_grad=True)
    y = cgpass.checkpoint(fn, x, cache, seen=seen, use_reentrant=reentrant)
    assert list(cache) == ["old", "new"]
    assert torch.equal(cache["new"], x.detach() * 2)
    assert len(seen) == 1
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x * cache["old"]).cos() * cache["old"])
