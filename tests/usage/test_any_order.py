"""Forwards and backwards come in any order, with hooks of every kind; gradients are added as autograd adds them."""

import collections
import copy
import functools
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.usage.programs import ALL, MLP, Block, Ways, gradients, in_threads, learn, steady

ways = Ways()


@ways()
def interleaved(session):
    """A pipeline: every backward comes one step after the next forward."""
    module, call = session.compiled(Block)
    before = None
    for batch in session.batches(2, 6, 16, count=10):
        out = call(batch)
        if before is not None:
            before.square().mean().backward()
            yield [before.detach(), *gradients(module)]
            module.zero_grad(set_to_none=True)
        before = out


# both backwards of the warmed up forward find its saved tensors outside the pool: they warm up
@ways(counts={**steady(2, warmups=3), "calls": 8 + 16})
def retained_graph(session, since=0):
    """Backwards run twice, at first or only after one was recorded that may write on what the forward saved."""
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8)):
        loss = call(batch).square().mean()
        if number >= since:
            loss.backward(retain_graph=True)
        loss.backward()
        yield gradients(module)


@ways(settings=ALL)
def graph_retained_later(session):
    return retained_graph(session, since=3)


@ways(replays="some")
def gradients_that_come_in_are_of_any_layout(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        incoming = (
            session.randn(4, 8),
            session.randn(8, 4).t(),
            session.randn(1, 8).expand(4, 8),
            session.randn(4, 16)[:, ::2],
        )[number % 4]
        call(batch).backward(incoming)
        yield [incoming, *gradients(module)]
        module.zero_grad()


@ways()
def backward_into_chosen_inputs_only(session):
    module, call = session.compiled(MLP)
    first, *_, last = module.parameters()
    for number, batch in enumerate(session.batches(4, 8, count=9)):
        chosen = ([first], [last], [first, last])[number % 3]
        call(batch).square().mean().backward(inputs=chosen)
        yield gradients(module)


@ways()
def hooks_of_tensors_fire_once_a_step(session):
    module, call = session.compiled(MLP)
    fired = collections.Counter()
    for p in module.parameters():
        p.register_hook(lambda g: (fired.update(["parameter"]), g * 2)[1])
    for batch in session.batches(4, 8, count=8):
        fired.clear()
        batch.requires_grad_()
        batch.register_hook(lambda g: fired.update(["input"]))
        out = call(batch)
        assert not out._backward_hooks
        out.retain_grad()
        out.register_hook(lambda g: (fired.update(["output"]), g * 3)[1])
        learned = learn(module, out.square().mean())
        yield [out.grad, batch.grad, *learned]
        assert fired == {"parameter": 4, "input": 1, "output": 1}


@ways(replays="some")
def hooks_of_modules_fire_once_a_step(session):
    module, fired = session.module(MLP), collections.Counter()
    module.register_full_backward_hook(lambda m, gin, gout: fired.update(["backward"]))
    call = session.compile(module)
    call.register_forward_pre_hook(lambda m, args: fired.update(["before"]))
    call.register_forward_hook(lambda m, args, out: fired.update(["after"]))
    module.layers[-1].register_forward_hook(lambda m, args, out: out * 2)
    for batch in session.batches(4, 8, count=8):
        fired.clear()
        out = call(batch.requires_grad_())
        yield [out.detach(), *learn(module, out.square().mean()), batch.grad]
        assert fired == {"before": 1, "after": 1, "backward": 1}


@ways.everywhere
def test_orders_and_hooks(way, program):
    program.check(way)


def test_more_forwards_than_may_be_pending_run_without_a_graph(way, caplog):
    def program(session):
        module, call = session.compiled(MLP)
        for _ in range(20):
            losses = [call(session.randn(4, 8)).square().mean() for _ in range(7)]
            for loss in losses[::2] + losses[1::2]:
                loss.backward()
            yield [value.detach().clone() for value in (*losses, *gradients(module))]
            module.zero_grad()

    counters = way.compare(program, max_pending_calls=4)
    (message,) = caplog.messages
    assert "results of 4 earlier calls were still referenced" in message
    assert counters["plain_calls"] >= 2 * 3 * 15, counters
    assert counters["replays"] >= 2 * 4 * 15, counters
    assert counters["recordings"] <= 10, counters


# ---- gradients of leaves are added as autograd adds them: hooks, types, threads, named inputs


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


HOOKS = {
    "tensor": lambda parameter, note: parameter.register_hook(lambda grad: note() or grad * 2),
    "before": lambda parameter, note: end(parameter).register_prehook(lambda grads: note()),
    "added": lambda parameter, note: parameter.register_post_accumulate_grad_hook(
        lambda p: note(p.grad.sum().item())
    ),
    "after": lambda parameter, note: end(parameter).register_hook(lambda out, grads: note()),
}


def end(parameter):
    """The node that adds to its gradient; its hooks live as long as it does."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("kinds", [["tensor"], ["added"], list(HOOKS)], ids="-".join)
@pytest.mark.parametrize("early", [True, False])
def test_hooks_on_a_parameter_leave_it_to_autograd(way, kinds, early):
    """Also those that come between a forward and its backward."""
    session, plain, module, call = made(way)
    x, found = session.randn(4, 8), {}
    for fn, each in ((plain, plain), (call, module)):
        first, seen = next(each.parameters()), []
        loss = None if early else fn(x).square().sum()
        node = end(first)
        for kind in kinds:
            HOOKS[kind](first, lambda *value, kind=kind, seen=seen: seen.append((kind, *value)))
        (fn(x).square().sum() if early else loss).backward()
        found[fn] = seen
        del node
    assert [kind for kind, *_ in found[call]] == kinds
    for ours, theirs in zip(found[call], found[plain], strict=True):
        assert ours[1:] == pytest.approx(theirs[1:], rel=1e-4, abs=1e-5)
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

    in_threads(*(functools.partial(go_back, loss) for loss in losses))
    assert seen == ["begins", "ends"] * 2


def test_threads_that_make_a_parameters_node_at_once_go_on(way):
    """Torch makes the node of a leaf that none leads to under a lock, and asks for the GIL meanwhile."""
    session = way.session()
    shared = nn.Parameter(torch.ones(8, device=session.device))

    def fn(x):
        return (shared * x).sum()

    def go_back(fn):
        for _ in range(500):
            fn(x).backward()

    x, call = torch.ones_like(shared), session.compile(fn)
    for _ in range(3):
        call(x).backward()
    shared.grad = torch.zeros_like(shared)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(*(functools.partial(go_back, each) for each in (fn, call)))
    finally:
        sys.setswitchinterval(interval)
    assert bool((shared.grad == 1000).all())


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
