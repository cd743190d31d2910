"""An exception that comes in the middle of the runtime's work makes no later call wrong."""

import contextlib
import gc
import itertools
import re
import sys

import pytest
import torch
from faultlib import campaign as campaigns
from faultlib import inject
from faultlib.campaign import Campaign
from faultlib.programs import PROGRAMS, Session

import cgpass
from cgpass import telemetry, torch_private
from cgpass.runtime import simulated
from cgpass.runtime.executor import Executor

OPTIONS = {"driver": "simulated", "compiler": "eager"}


def compiled():
    weight = torch.randn(4, 4)

    def fn(x):
        return (x @ weight).sin().cos().tanh().exp()

    return fn, torch.compile(fn, backend="cgpass", options=OPTIONS)


@pytest.fixture
def nothing_stays_frozen():
    """A campaign freezes its program, which would then live as long as the process, and be in every summary."""
    yield
    gc.unfreeze()
    gc.collect()


def assert_all_come_out_right(faults, at_least):
    """`scripts/faults.py` injects all of them, in all programs."""
    number = 0
    for what, inject_it in faults:
        why = inject_it()
        assert why is None or why is False, what
        number += why is None
    assert number > at_least


@pytest.mark.usefixtures("nothing_stays_frozen")
def test_a_rescue_that_an_exception_ends_leaves_no_stale_values():
    """At lines and native calls of what moves: what was held stays, and later calls give their own values."""
    faults = Campaign("held_now_and_then").faults()
    moves = re.compile(r"runtime/(owner|outputs)\.py:.*settled")
    assert_all_come_out_right([fault for fault in faults if moves.search(fault[0])][::3], 40)


@pytest.mark.usefixtures("nothing_stays_frozen")
@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("held_now_and_then", 31),
        ("dropout", 61),
        ("train_step_adamw", 97),
        ("graphed_pending", 151),
    ],
)
def test_programs_go_on_after_any_fault(name, every):
    assert_all_come_out_right(Campaign(name).faults()[::every], 40)


@pytest.mark.usefixtures("nothing_stays_frozen")
@pytest.mark.parametrize("name", ["gpt", "convolutions", "attention"])
def test_a_capture_that_fails_at_any_operator_of_a_model(name):
    assert_all_come_out_right(Campaign(name).captures()[::20], 10)


@pytest.mark.usefixtures("nothing_stays_frozen")
@pytest.mark.parametrize(
    "name", ["held_now_and_then", "dropout", "train_step_adamw", "pending_calls", "host_sync"]
)
def test_signals_in_the_middle_of_calls(name, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back
    with torch._dynamo.config.patch(recompile_limit=100):  # signals have Dynamo compile again
        faults = Campaign(name).alarms(60)
        assert_all_come_out_right(faults, 5)  # runs may be faster than measured


def outcome(name):
    """A program and a session with graphs that has run it, and its values without."""
    torch.compiler.reset()  # whatever earlier tests compiled or gave up
    sessions = [Session(driver) for driver in ("none", "simulated")]
    for session in sessions:
        values_of(session, PROGRAMS[name])
    return sessions[1], PROGRAMS[name], values_of(sessions[0], PROGRAMS[name])


def values_of(session, run):
    values = session.begin()
    run(session)
    return values


def assert_right(session, run, expected):
    ours = values_of(session, run)
    assert len(ours) == len(expected)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("name", ["held_now_and_then", "dropout", "moved_parameters"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_memory_that_runs_out_at_any_request(name, error, monkeypatch):
    """While recording, and for what is copied in and what is rescued."""
    session, run, expected = outcome(name)
    left = [0]

    def failing(known):
        def allocate(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise error("injected")
            return known(*args, **kwargs)

        return allocate

    monkeypatch.setattr(
        simulated.SimulatedPool, "allocate", failing(simulated.SimulatedPool.allocate)
    )
    monkeypatch.setattr(torch, "empty_strided", failing(torch.empty_strided))
    monkeypatch.setattr(torch, "empty_like", failing(torch.empty_like))
    for number in range(1, 1000, 3):
        cgpass.reset()
        left[0] = number
        with contextlib.suppress(error):
            assert_right(session, run, expected)
        if left[0] > 0:
            break
        for _ in range(2):
            assert_right(session, run, expected)
    assert number > 5


class StopError(Exception):
    pass


def stopping(when, error=StopError):
    """Raises at one of its calls, and returns nothing."""
    calls = itertools.count()

    def hook(*args):
        if next(calls) == when:
            raise error

    return hook


def keeping(hook):
    def kept(tensor):
        hook(tensor)
        return tensor

    return kept


HOOKED = {
    "tensor": lambda hook, out, weight: out.register_hook(hook),
    "node": lambda hook, out, weight: out.grad_fn.register_prehook(hook),
    "leaf": lambda hook, out, weight: weight.register_hook(hook),
    "accumulated": lambda hook, out, weight: weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("where", ["pack", "unpack", *HOOKED])
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_a_hook_that_raises(where, when):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    call = torch.compile(module, backend="cgpass", options=OPTIONS)
    x, hook, raised = torch.randn(3, 4), stopping(when), 0
    pack, unpack = (keeping(hook) if where == name else torch.detach for name in ("pack", "unpack"))

    def gradients(call):
        module.zero_grad()
        call(x).square().mean().backward()
        return [p.grad.clone() for p in module.parameters()]

    expected = gradients(module)
    for _ in range(6):
        with contextlib.ExitStack() as stack:
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    out = call(x)
                if where in HOOKED:
                    stack.callback(HOOKED[where](hook, out, module[0].weight).remove)
                out.square().mean().backward()
            except StopError:
                raised += 1
        for ours, theirs in zip(gradients(call), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert raised == 1


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
def test_an_optimizer_that_raises_in_a_step(monkeypatch, error):
    """Nothing of what a capture made is left in `.grad`, and later steps are right."""
    session, run, expected = outcome("train_step_sgd")
    hook, update = [stopping(-1)], torch._fused_sgd_

    def sgd(*args, **kwargs):
        hook[0]()
        return update(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", sgd)
    for when in range(6):
        cgpass.reset()
        hook[0] = stopping(when, error)
        with contextlib.suppress(error):
            values_of(session, run)
        hook[0] = stopping(-1)
        for _ in range(2):
            assert_right(session, run, expected)


def trained_twice(**settings):
    """A step that replays, one without graphs that trains the same, and their modules."""
    made = []
    for driver in ("simulated", "none"):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, fused=True)
        options = OPTIONS | {"driver": driver}

        def loss_fn(x, module=module):
            return module(x).square().mean()

        step = cgpass.train_step(loss_fn, optimizer, options=options, **settings)
        made.append((step, module, optimizer))
    return made


def test_a_step_that_is_broken_off_where_it_reads_a_new_number():
    """Later steps read that number, not the one before it."""
    (step, module, optimizer), (twin, other, its) = trained_twice()
    x, number = torch.randn(3, 4), 0

    def change():
        nonlocal number
        number += 1
        for each in (optimizer, its):
            each.param_groups[0]["weight_decay"] = (0.1, 0.5)[number % 2]

    def both(times):
        for _ in range(times):
            assert torch.equal(step(x), twin(x)), point

    def in_step(name):
        return name.endswith(("cgpass/whole_step.py", "cgpass/update.py"))

    point = None
    for _ in range(3):
        both(4)
        change()
    both(1)
    with inject.noted(in_step) as points:
        step(x)
    twin(x)
    assert len(points) > 100
    for point in points[::4]:
        change()
        both(1)
        kept = [*module.parameters(), *(v["momentum_buffer"] for v in optimizer.state.values())]
        before = [value.detach().clone() for value in kept]
        with inject.fault(point, KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            step(x)
        with torch.no_grad():
            for value, saved in zip(kept, before, strict=True):
                value.copy_(saved)
        optimizer.zero_grad()
        both(3)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_a_flush_that_is_broken_off_before_it_updates(monkeypatch):
    (step, module, _), (twin, other, _) = trained_twice(accumulate=2)
    x = torch.randn(3, 4)
    for _ in range(3):
        step(x)
        twin(x)
    with monkeypatch.context() as patched:
        patched.setattr(torch_private, "host_reads", stopping(0))
        with pytest.raises(StopError):
            step.flush()
    assert step.flush()
    assert twin.flush()
    assert not step.flush()
    assert all(map(torch.equal, module.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", ["compiled", "graphed"])
def test_a_backward_that_is_broken_off_is_made_again(kind):
    """Of a call before the newest one: what it saved is copied back, and what lies there is moved."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    if kind == "compiled":
        call = torch.compile(module, backend="cgpass", options=OPTIONS)
    else:
        sample, options = torch.ones(3, 4, requires_grad=True), {"driver": "simulated"}
        call = cgpass.make_graphed_callables(module, (sample,), options=options)
    inputs, params = [torch.randn(3, 4) for _ in "ab"], list(module.parameters())

    def prepared():
        losses = [call(x.clone().requires_grad_()).square().mean() for x in inputs]
        return losses[0], losses

    def gradients(loss):
        return torch.autograd.grad(loss, params, retain_graph=True)

    expected = gradients(module(inputs[0]).square().mean())
    for _ in range(4):
        loss, held = prepared()
        gradients(loss)
    loss, held = prepared()
    with inject.noted(campaigns.in_runtime) as points:
        gradients(loss)
    points = [point for point in points if point.file.endswith(("outputs.py", "owner.py"))]
    for point in points[::3]:
        loss, held = prepared()
        with inject.fault(point, MemoryError), contextlib.suppress(MemoryError):
            gradients(loss)
        assert all(map(torch.equal, gradients(loss), expected)), point
    del held


def told(name):
    return name.endswith("executor.py") or "/cgpass/report/" in name or "/cgpass/telemetry/" in name


@pytest.mark.parametrize("block", [cgpass.verify, cgpass.explain])
def test_a_check_that_is_broken_off_leaves_calls_as_they_were(block):
    """At its begin, inside and at its end: later calls replay, and nothing looks at them any more."""
    fn, call = compiled()
    x = torch.randn(3, 4)
    torch.compiler.reset()
    cgpass.reset()

    def check():
        with block():
            call(x)
            call(x)

    for _ in range(3):
        check()
    with inject.noted(told) as points:
        check()
    first = {point: point for point in points if point.time < 2}
    assert len(first) > 100
    executors = [e for e in gc.get_objects() if type(e) is Executor]
    for point in list(first)[::3]:
        with inject.fault(point, KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            check()
        gc.collect(1)  # the error and its traceback, but not all that other tests left
        with cgpass.expect(replays=2, recordings=0):
            assert torch.equal(call(x), fn(x)), point
            assert torch.equal(call(x), fn(x)), point
        assert not telemetry.registry.listeners, point
        assert not [e for e in executors if e._wraps], point
