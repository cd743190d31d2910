"""Gradients of leaves are added as autograd adds them: hooks, types, threads, named inputs."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.usage.programs import MLP


def made(way):
    """The same module twice, compiled and not, after some calls."""
    session = way.session()
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


def hook_all_ways(parameter, seen):
    parameter.register_hook(lambda grad: seen.append(("tensor", grad.sum().item())) or grad * 2)
    end = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    end.register_prehook(lambda grads: seen.append(("before", grads[0].sum().item())))
    end.register_hook(lambda out, grads: seen.append(("after", len(out), grads[0].sum().item())))
    parameter.register_post_accumulate_grad_hook(
        lambda p: seen.append(("added", p.grad.sum().item()))
    )
    return end  # its hooks live as long as it does


def test_hooks_that_come_between_a_forward_and_its_backward(way):
    session, plain, module, call = made(way)
    found = {}
    x = session.randn(4, 8)
    for fn, each in ((plain, plain), (call, module)):
        loss = fn(x).square().sum()
        first, _, third, *_ = each.parameters()
        found[fn] = []
        ends = [hook_all_ways(p, found[fn]) for p in (first, third)]
        loss.backward()
        del ends
    same(plain, module)
    for hooked in (0, 1):  # each parameter's in their order
        ours, theirs = (
            [name for name, *_ in found[fn][4 * hooked : 4 * hooked + 4]] for fn in (call, plain)
        )
        assert ours == theirs == ["tensor", "before", "added", "after"]
    for a, b in zip(sorted(found[call]), sorted(found[plain]), strict=True):
        assert a[0] == b[0]
        assert a[1:] == pytest.approx(b[1:], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "added"])
def test_a_hook_that_comes_before_the_backward_and_is_all_there_is(way, kind):
    session, plain, module, call = made(way)
    x, seen = session.randn(4, 8), []
    for fn, each in ((plain, plain), (call, module)):
        loss = fn(x).square().sum()
        first, *_ = each.parameters()
        if kind == "tensor":
            first.register_hook(lambda grad: seen.append(grad.shape) or grad * 2)
        else:
            first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        loss.backward()
    assert len(seen) == 2
    same(plain, module)


def test_a_type_that_gradients_get_before_the_backward(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8)
    for fn, each in ((plain, plain), (call, module)):
        loss = fn(x).square().sum()
        next(each.parameters()).grad_dtype = torch.float64
        loss.backward()
    assert next(module.parameters()).grad.dtype == torch.float64
    same(plain, module)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class SlowAdditions(TorchDispatchMode):
    """Has additions to one gradient take long, and notes when they begin and end."""

    def __init__(self, grad, seen):
        super().__init__()
        self._grad, self._seen = grad, seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.add_.Tensor or args[0] is not self._grad:
            return func(*args, **(kwargs or {}))
        self._seen.append("begins")
        time.sleep(0.2)
        result = func(*args, **(kwargs or {}))
        self._seen.append("ends")
        return result


def test_one_thread_adds_to_a_parameter_at_a_time(way):
    session, _, module, call = made(way)
    weight, seen = next(module.parameters()), []
    losses = [call(session.randn(4, 8)).square().sum(), (weight * 2).sum()]
    weight.grad = torch.zeros_like(weight)

    def go_back(loss):
        with torch.autograd.set_multithreading_enabled(False), SlowAdditions(weight.grad, seen):
            loss.backward()

    threads = [threading.Thread(target=go_back, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["begins", "ends"] * 2


@pytest.mark.parametrize("other", ["eager", "compiled"])
def test_threads_that_add_to_one_parameter_lose_nothing(way, other):
    """Additions that take long enough to meet; each backward makes and drops what the other adds through."""
    session = way.session()
    shared = nn.Parameter(torch.ones(1 << 20, device=session.device))
    own = [nn.Parameter(torch.ones(4, device=session.device)) for _ in range(2)]
    x = torch.ones_like(shared)

    def made(weight):
        return lambda x: (shared * x).sum() + (weight * 2).sum()

    fns = [session.compile(made(own[0])), made(own[1])]
    if other == "compiled":
        fns[1] = session.compile(fns[1])

    def go_back(fn):
        for _ in range(8):
            fn(x).backward()

    for fn in fns:
        go_back(fn)
    for _ in range(4):
        shared.grad = torch.zeros_like(shared)
        threads = [threading.Thread(target=go_back, args=(fn,)) for fn in fns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bool((shared.grad == 16).all())


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


def test_parameters_may_be_swapped_while_a_result_is_held(way):
    session, plain, module, call = made(way)
    x = session.randn(4, 8)
    held = [fn(x).square().sum() for fn in (plain, call)]
    for loss in held:
        loss.backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for each in (plain, module):
            each.to(torch.float64)
            each.load_state_dict({k: v / 2 for k, v in each.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    for fn in (plain, call):
        fn(x.double()).square().sum().backward()
    same(plain, module)
    with pytest.raises(RuntimeError, match="second time"):
        held[1].backward()


def test_parameters_that_are_frozen_before_the_backward(way):
    session, plain, module, call = made(way)
    x, seen = session.randn(4, 8), []
    for fn, each in ((plain, plain), (call, module)):
        frozen, *others = each.parameters()
        hook = frozen.register_hook(seen.append)
        loss = fn(x).square().sum()
        frozen.requires_grad_(False)
        loss.backward()
        hook.remove()
        assert frozen.grad is None
        assert all(p.grad is not None for p in others)
    torch.testing.assert_close(*seen)
