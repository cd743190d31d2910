"""What a user holds keeps its value, and forwards and backwards come in any order."""

import itertools
import logging

import pytest
import torch

import cgpass
from tests.usage import programs
from tests.usage.programs import (
    ATEN,
    MLP,
    Block,
    Ways,
    assert_replays,
    assert_steady,
    gradients,
    steady,
)


def held_outputs(session):
    """Outputs, views of them and gradients are kept over all later calls."""
    module, call = session.compiled(MLP)
    held, kept = [], []
    for batch in session.batches(4, 8):
        out = call(batch)
        out.square().mean().backward()
        held += [out.detach(), out.detach()[1:]]
        held += [parameter.grad for parameter in module.parameters()]
        kept.append(out)
        module.zero_grad(set_to_none=True)
    return held


def assert_settled(counters, *, captured=2, recordings=None):
    """Every call but the warm-ups is a replay, and what is held is moved once.

    Gradients that are kept over a forward get a pool of their own: one recording more.
    """
    most = 2 * captured + 1 if recordings is None else recordings
    assert counters["partitions_captured"] == captured, counters
    assert captured <= counters["recordings"] <= most, counters
    assert counters["plain_calls"] == counters["rerecordings"] == 0, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0, counters
    assert counters["rescues"] <= 2 * counters["calls"], counters


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_outputs_and_gradients_stay(setting, compiler):
    counters = setting.compare(held_outputs, compiler=compiler)
    assert_settled(counters)
    assert counters["rescues"] > 0, counters


def grown(program):
    """A program, and a dict of what its counters say after each call of the function it is given."""
    found = []

    def noting(session):
        found.clear()
        start = cgpass.counters()

        def note():
            now = cgpass.counters()
            found.append({key: value - start[key] for key, value in now.items()})

        return program(session, note)

    return noting, found


def growth(found, key):
    """By how much a counter grows from one call to the next."""
    return [after[key] - before[key] for before, after in itertools.pairwise(found)]


def dropped_outputs(session, note):
    """The plain training loop: nothing of a step is held in the next one's forward."""
    module, call = session.compiled(MLP)
    values = []
    for batch in session.batches(4, 8, count=12):
        module.zero_grad(set_to_none=True)
        out = call(batch)
        out.square().mean().backward()
        values += [out.detach().clone(), *gradients(module)]
        del out
        note()
    return values


def gradients_held_during_the_forward(session, note):
    """Gradients are dropped between forward and backward."""
    module, call = session.compiled(MLP)
    values = []
    for batch in session.batches(4, 8, count=16):
        out = call(batch)
        loss = out.square().mean()
        del out
        module.zero_grad(set_to_none=True)
        loss.backward()
        values += [loss.detach().clone(), *gradients(module)]
        del loss
        note()
    return values


NEEDED = 3 * 4 * 8 * 4
"""Bytes of a batch, which forward and backward read, and of the gradient of its output."""


@pytest.mark.parametrize("program", [dropped_outputs, gradients_held_during_the_forward])
def test_the_plain_training_loop_copies_nothing_but_inputs(setting, program):
    noting, found = grown(program)
    ours = setting.run(noting)
    settled = found[8:]
    plain = setting.run(noting, driver="none")
    assert not programs.differences(ours, plain)
    steps = len(settled) - 1
    assert steps >= 3
    assert growth(settled, "rescues") == growth(settled, "rescued_bytes") == [0] * steps
    assert growth(settled, "recordings") == growth(settled, "plain_calls") == [0] * steps
    assert growth(settled, "replays") == [2] * steps
    assert growth(settled, "copied_bytes") == [NEEDED] * steps


def pending_forwards(order):
    """Some forwards run before their backwards, which come in the given order."""

    def program(session):
        module, call = session.compiled(Block)
        call(session.randn(2, 6, 16)).sum().backward()
        values = gradients(module)
        for _ in range(3):
            outs = [call(batch) for batch in session.batches(2, 6, 16, count=len(order))]
            for number in order:
                outs[number].square().mean().backward()
            values += [out.detach() for out in outs]
            values += gradients(module)
            module.zero_grad(set_to_none=True)
        return values

    return program


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_forwards_before_their_backwards(setting, order):
    assert_steady(setting.compare(pending_forwards(order)), captured=2, recordings=6)


def interleaved(session):
    """A pipeline: every backward comes one step after the next forward."""
    module, call = session.compiled(Block)
    values, before = [], None
    for batch in session.batches(2, 6, 16, count=10):
        out = call(batch)
        if before is not None:
            before.square().mean().backward()
            values += [before.detach(), *gradients(module)]
            module.zero_grad(set_to_none=True)
        before = out
    return values


ways = Ways(*ATEN)
ways()(interleaved)


@ways(counts=steady(2))
def a_forward_whose_backward_never_comes(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        out = call(batch)
        yield [out.detach()]
        if number % 3 != 1:
            out.square().mean().backward()
        del out
    yield gradients(module)


def retained_graph(session):
    """Every backward runs twice."""
    module, call = session.compiled(MLP)
    values = []
    for batch in session.batches(4, 8):
        loss = call(batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        values += gradients(module)
    return values


def test_retained_graph(setting):
    counters = setting.compare(retained_graph)
    # both backwards of the warmed up forward find its saved tensors outside the pool: they warm up
    assert_steady(counters, captured=2, warmups=3)
    assert counters["calls"] == 8 + 16


def graph_retained_later(session):
    """Backwards run twice only after one was recorded that may write on what the forward saved."""
    module, call = session.compiled(MLP)
    values = []
    for number, batch in enumerate(session.batches(4, 8)):
        loss = call(batch).square().mean()
        if number >= 3:
            loss.backward(retain_graph=True)
        loss.backward()
        values += gradients(module)
    return values


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_graph_retained_only_after_the_backward_was_compiled(setting, compiler):
    counters = setting.compare(graph_retained_later, compiler=compiler)
    assert_replays(counters)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(setting, set_to_none):
    def program(session, note):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=20)):
            (call(batch).square().mean() / 4).backward()
            if number % 4 == 3:
                values += gradients(module)
                module.zero_grad(set_to_none=set_to_none)
                note()
        return values

    noting, found = grown(program)
    assert_steady(setting.compare(noting), captured=2, recordings=2 + set_to_none)
    setting.run(noting)
    cycles = [found[0]["rescues"], *growth(found, "rescues")]
    most = [1] * 5 if set_to_none else [1, 0, 0, 0, 0]
    assert all(a <= b for a, b in zip(cycles, most, strict=True)), cycles


@ways(counts=steady(1))
def an_output_edited_in_place(session):
    _, call = session.compiled(MLP)
    with torch.no_grad():
        for batch in session.batches(4, 8):
            out = call(batch)
            yield [out.clone(), out.mul_(2).add_(1)]


@ways(counts=steady(1))
def outputs_that_share_memory_share_it_for_the_user(session):
    def fn(x):
        y = x * 2 + 1
        y = y.sin().cos()
        return y, y.view(-1), y[1:]

    call = session.compile(fn)
    for batch in session.batches(4, 8):
        whole, flat, part = call(batch)
        whole.add_(1)
        yield [whole, flat, part]


# ---- results of earlier calls that are still held: few recordings, whatever the number of calls


@ways(most={"recordings": 3})
def held_by_the_loop(session):
    _, call = session.compiled(MLP)
    for _ in range(30):
        out = call(session.randn(4, 8))  # the old result lives until the new one is there
        yield [out.detach().clone()]


@ways(most={"recordings": 7})
def backward_after_the_next_forward(session):
    """The first forwards have AOTAutograd's node, since the backward is compiled later: one recording more."""
    module, call = session.compiled(MLP)
    pending = call(session.randn(4, 8)).square().mean()
    for _ in range(30):
        following = call(session.randn(4, 8)).square().mean()
        pending.backward()
        yield gradients(module)
        pending = following


@ways(replays="none", most={"recordings": 10})
def fresh_parameters_every_call(session):
    module = session.module(MLP)
    call = session.compile(lambda params, x: torch.func.functional_call(module, params, (x,)))
    kept = []  # else memory would come back at the same addresses
    for _ in range(40):
        kept.append(
            {n: torch.nn.Parameter(session.randn(*p.shape)) for n, p in module.named_parameters()}
        )
        yield [call(kept[-1], session.randn(4, 8)).detach()]


@ways.everywhere
def test_ways_to_hold_and_pend(way, program):
    program.check(way)


def test_gradients_of_inputs(setting):
    def program(session):
        _, call = session.compiled(MLP)
        for batch in session.batches(4, 8):
            call(batch.requires_grad_()).square().mean().backward()
            yield [batch.grad]

    counters = setting.compare(program)
    assert_settled(counters)
    assert counters["rescues"] > 0, counters


@pytest.mark.parametrize("enough", [False, True])
def test_results_of_as_many_calls_may_be_held_as_the_option_says(setting, caplog, enough):
    """Past it they run plainly and say so once."""

    def program(session):
        _, call = session.compiled(MLP)
        for _ in range(2):
            held = [call(session.randn(4, 8)) for _ in range(30)]
        return [h.detach().clone() for h in held]

    with (
        cgpass.set_defaults(max_pending_calls=64 if enough else 16),
        caplog.at_level(logging.WARNING, "cgpass"),
    ):
        counters = setting.compare(program)
    said = [r.getMessage() for r in caplog.records if "still referenced" in r.getMessage()]
    assert len(said) == (not enough), said
    assert (counters["plain_calls"] == 0) == enough, counters
    assert enough or counters["recordings"] < 20, counters
