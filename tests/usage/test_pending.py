"""Results of earlier calls that are still held: few recordings, whatever the number of calls."""

import logging

import pytest
import torch

import cgpass
from tests.usage.programs import MLP


def held_by_the_loop(session):
    _, call = session.compiled(MLP)
    results = []
    out = None
    for _ in range(30):
        out = call(session.randn(4, 8))  # the old result lives until the new one is there
        results.append(out.detach().clone())
    return results


def backward_after_the_next_forward(session):
    module, call = session.compiled(MLP)
    pending = call(session.randn(4, 8)).square().mean()
    results = []
    for _ in range(30):
        following = call(session.randn(4, 8)).square().mean()
        pending.backward()
        results += [p.grad.clone() for p in module.parameters()]
        pending = following
    return results


@pytest.mark.parametrize(
    ("program", "most"), [(held_by_the_loop, 3), (backward_after_the_next_forward, 7)]
)
def test_two_calls_that_take_turns_keep_taking_turns(setting, program, most):
    """The first forwards have AOTAutograd's node, since the backward is compiled later: one recording more."""
    counters = setting.compare(program)
    assert counters["plain_calls"] == 0, counters
    assert counters["recordings"] <= most, counters


def test_results_of_many_calls_held_run_plainly_and_say_so(setting, caplog):
    def program(session):
        _, call = session.compiled(MLP)
        held = [call(session.randn(4, 8)) for _ in range(40)]
        return [h.detach().clone() for h in held]

    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(program)
    assert counters["recordings"] < 20, counters
    assert counters["plain_calls"] > 10, counters
    messages = [r.getMessage() for r in caplog.records if "still referenced" in r.getMessage()]
    assert len(messages) == 1, messages


def test_results_of_as_many_calls_may_be_held_as_the_option_says(setting, caplog):
    def program(session):
        _, call = session.compiled(MLP)
        for _ in range(2):
            held = [call(session.randn(4, 8)) for _ in range(30)]
        return [h.detach().clone() for h in held]

    with cgpass.set_defaults(max_pending_calls=64), caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(program)
    assert counters["plain_calls"] == 0, counters
    assert not [r.getMessage() for r in caplog.records if "still referenced" in r.getMessage()]


def test_fresh_parameters_every_call_are_not_recorded_each_time(setting):
    def program(session):
        module, _ = session.compiled(MLP)
        names = [name for name, _ in module.named_parameters()]
        apply = session.compile(lambda params, x: torch.func.functional_call(module, params, (x,)))
        kept, results = [], []
        for _ in range(40):
            fresh = {
                n: torch.nn.Parameter(session.randn(*p.shape))
                for n, p in zip(names, module.parameters(), strict=True)
            }
            kept.append(fresh)  # else memory would come back at the same addresses
            results.append(apply(fresh, session.randn(4, 8)).detach())
        return results

    counters = setting.compare(program)
    assert counters["recordings"] <= 10, counters


@pytest.mark.parametrize("grad", [False, True])
def test_conjugate_and_negative_bits(setting, grad):
    def program(session):
        def fn(x, w):
            y = (x @ w).sin() * w.sum().conj()
            return y, y.conj(), x.conj(), torch._neg_view(y.real)

        call = session.compile(fn)
        results = []
        for _ in range(4):
            real, imag = session.randn(3, 4), session.randn(3, 4)
            x = torch.complex(real, imag).conj().requires_grad_(grad)
            w = torch.complex(session.randn(4, 2), session.randn(4, 2)).requires_grad_(grad)
            outputs = call(x, w)
            results += [o.resolve_conj().resolve_neg().detach().clone() for o in outputs]
            if grad:
                gradients = torch.autograd.grad(outputs[0].abs().sum(), (x, w))
                results += [g.resolve_conj() for g in gradients]
        return results

    setting.compare(program)
