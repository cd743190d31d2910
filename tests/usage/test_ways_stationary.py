"""Inputs that stay where they are: they are copied no more, until they move."""

from unittest import mock

import pytest
import torch
from torch import nn

from cgpass.runtime import gathered, signature, stationary
from tests.usage import programs
from tests.usage.programs import MLP, Block, Counter, ReadsValue, assert_replays

CALLS = 3


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(stationary, "CALLS", CALLS)


def moved_after(stay, count=24, make=MLP, shape=(4, 8)):
    """A program that trains on one batch, then on another one in each call."""

    def program(session):
        module, call = session.compiled(make)
        (batch,) = session.batches(*shape, count=1)
        kept, values = [], []
        for number, new in enumerate(session.batches(*shape, count=count)):
            if number < stay:
                batch.copy_(new)
            else:
                kept.append(batch)
                batch.fill_(float("nan"))
                batch = new.clone()
            out = call(batch)
            out.square().mean().backward()
            values += [out.detach().clone(), *programs.gradients(module)]
            del out
            module.zero_grad(set_to_none=True)
        return values

    return program


def test_a_batch_that_stays_is_copied_no_more(way):
    counters = way.compare(moved_after(stay=24))
    assert_replays(counters)
    assert counters["promotions"] > 0
    batch = 4 * 8 * 4
    gradients = 23 * batch  # of the output: they may lie elsewhere in each step
    few = 2 * (CALLS + stationary.MOVES + 2) * batch
    assert counters["copied_bytes"] <= gradients + few, (
        "neither forward nor backward copies for long"
    )


@pytest.mark.parametrize("stay", [6, 8, 9, 12])
def test_a_batch_that_moves_after_all(way, stay):
    counters = way.compare(moved_after(stay))
    assert_replays(counters)


def test_a_new_batch_in_every_call_is_never_read_in_place(way):
    def program(session):
        _, call = session.compiled(MLP)
        batches = session.batches(4, 8, count=20)
        with torch.no_grad():
            return [call(batch) for batch in batches]

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["promotions"] == 0


def test_batches_that_take_turns(way):
    def program(session):
        module, call = session.compiled(Block)
        buffers, values = session.batches(2, 6, 16, count=2), []
        for number, new in enumerate(session.batches(2, 6, 16, count=20)):
            batch = buffers[number % 2]
            batch.copy_(new)
            out = call(batch)
            out.sum().backward()
            values += [out, *programs.gradients(module)]
            module.zero_grad(set_to_none=True)
        return values

    assert_replays(way.compare(program))


def test_a_cache_that_the_model_writes(way):
    """A cache that the user keeps: written where it lies, then swapped for another."""

    def program(session):
        _, call = session.compiled(Counter)
        caches, values = session.randn(2, 8).unbind(), []
        caches = [cache.clone() for cache in caches]
        with torch.no_grad():
            for number, batch in enumerate(session.batches(4, 8, count=24)):
                cache = caches[number >= 16]
                values += [call(batch, cache), cache.clone()]
        return [*values, *caches]

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["promotions"] > 0


def test_values_between_partitions_stay(way):
    """What the eager part of a graph makes is read where it lies, too."""
    counters = way.compare(moved_after(stay=24, make=ReadsValue))
    assert counters["plain_calls"] == 0
    assert counters["promotions"] > 0


def test_forwards_pending_on_one_batch(way):
    def program(session):
        module, call = session.compiled(MLP)
        (batch,) = session.batches(4, 8, count=1)
        values = []
        for number in range(16):
            batch.add_(0.1)
            if number % 2:
                outs = [call(batch), call(batch * 2), call(batch)]
            else:
                outs = [call(batch)]
            for out in outs:
                out.square().mean().backward()
            values += [*outs, *programs.gradients(module)]
            module.zero_grad(set_to_none=True)
        return values

    assert_replays(way.compare(program))


def test_one_function_feeds_another(way):
    """The second one's input lies in the first one's pool: the same place in every call."""

    def program(session):
        _, first = session.compiled(MLP)
        _, second = session.compiled(Block)
        values, kept = [], []
        with torch.no_grad():
            for number, batch in enumerate(session.batches(2, 16, count=24)):
                hidden = first(batch.view(4, 8)).view(1, 2, 16)
                values.append(second(hidden))
                if number in (15, 18):
                    kept.append(hidden)  # the next call moves it to memory of its own
                del hidden
        return values + kept

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["promotions"] > 0


def test_a_function_of_its_own_result(way):
    def program(session):
        _, call = session.compiled(MLP)
        (x,) = session.batches(4, 8, count=1)
        values = []
        with torch.no_grad():
            for _ in range(24):
                x = call(call(x))
                values.append(x.clone())
        return values

    assert_replays(way.compare(program))


def test_layers_that_share_one_function(way):
    """Regional compilation: each layer's input is the output of the one before it."""

    def program(session):
        layers, calls = zip(*(session.compiled(MLP) for _ in range(3)), strict=True)
        values = []
        for batch in session.batches(4, 8, count=24):
            x = batch
            for call in calls:
                x = call(x)
            x.square().mean().backward()
            values.append(x)
            for layer in layers:
                values += programs.gradients(layer)
                layer.zero_grad(set_to_none=True)
        return values

    counters = way.compare(program)
    # A batch may happen to lie in one place for a while, and then no more: the rest of that step runs plainly.
    plain = counters["plain_calls"]
    assert plain <= 3
    assert_replays(counters, plain=plain)


def test_the_batch_wants_a_gradient(way):
    def program(session):
        _, call = session.compiled(MLP)
        x = session.randn(4, 8).requires_grad_()
        y, values = session.randn(4, 8).requires_grad_(), []
        for number in range(20):
            batch = x if number < 14 else y
            call(batch).square().mean().backward()
            values.append(batch.grad.clone())
            with torch.no_grad():
                batch -= 0.1 * batch.grad
        return [*values, x, y]

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["promotions"] > 0


def test_an_error_for_moved_parameters_is_none_for_inputs(way):
    counters = way.compare(moved_after(stay=10), static_input_check="error")
    assert_replays(counters)


def test_a_view_of_an_input_that_stays(way):
    class Views(nn.Module):
        def forward(self, x):
            return x[1:].detach(), (x.sin() + 1).cos() * 2, x.view(-1)

    def program(session):
        _, call = session.compiled(Views)
        x, values = session.randn(4, 8), []
        with torch.no_grad():
            for number in range(16):
                if number == 12:
                    x = session.randn(4, 8)
                part, result, flat = call(x)
                x.mul_(0.5)
                values += [part, result, flat, part.data_ptr() - x.data_ptr()]
        return values

    assert_replays(way.compare(program))


def test_a_state_of_inference_mode_that_the_function_writes(way):
    class Adds(nn.Module):
        def forward(self, x, y):
            x.add_(y.sin())
            return (x * y).cos() + 1

    def program(session):
        _, call = session.compiled(Adds)
        values = []
        with torch.inference_mode():
            x, y = session.randn(4, 8), session.randn(4, 8)
            for _ in range(16):
                values.append(call(x, y).clone())
            return [*values, x.clone()]

    assert_replays(way.compare(program))


class Scaled(Block):
    def forward(self, x, scale):
        return super().forward(x) * scale


class Loss(MLP):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_loss_whose_gradient_moves(way):
    """Allocations between two steps put it elsewhere; nothing is recorded again for it."""

    def program(session):
        module, call = session.compiled(Loss)
        (batch,) = session.batches(4, 8, count=1)
        gradients = torch.ones(30, device=batch.device)
        values = []
        for number in range(30):
            call(batch).backward(gradients[max(number - 20, 0)])
            values += programs.gradients(module)
            module.zero_grad(set_to_none=True)
        return values

    counters = way.compare(program)
    assert_replays(counters)
    assert (counters["recordings"], counters["promotions"]) == (2 * 2, 2)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_share_code_read_what_they_hand_on_where_it_lies(way, training, monkeypatch):
    """Where all recordings are made anew, what one hands to the next lies elsewhere, and stays there."""
    monkeypatch.setattr(signature, "_SMALL_TANGENT", 1)
    steps, num_layers, shape = 24, 4, (2, 6, 16)

    def program(session):
        layers = [session.compiled(Block) for _ in range(num_layers)]
        values = []
        for batch in session.batches(*shape, count=steps):
            with torch.set_grad_enabled(training):
                x = batch
                for _, call in layers:
                    x = call(x)
                values.append(x.detach().clone())
                if training:
                    x.square().mean().backward()
                    for module, _ in layers:
                        values += programs.gradients(module)
                        module.zero_grad(set_to_none=True)
                del x
        return values

    counters = way.compare(program)
    assert_replays(counters)
    size = 2 * 6 * 16 * 4
    each = 3 if training else 1  # the batch, for the backward, too, and the last gradient
    at_first = each * num_layers * (CALLS + stationary.MOVES + 4) * size
    assert counters["promotions"] >= num_layers - 1
    assert counters["copied_bytes"] <= at_first + steps * each * size


def test_layers_that_are_left_out_later_have_it_all_made_anew_once(way, monkeypatch):
    monkeypatch.setattr(signature, "_SMALL_TANGENT", 1)

    def program(session):
        layers = [session.compiled(Block) for _ in range(6)]
        values = []
        for number, x in enumerate(session.batches(2, 6, 16, count=60)):
            left_out = number // 4 % 6 if number >= 16 and number % 4 == 0 else None
            for n, (_, call) in enumerate(layers):
                x = x if n == left_out else call(x)
            x.square().mean().backward()
            for module, _ in layers:
                values += [g for g in programs.gradients(module) if g is not None]
                module.zero_grad(set_to_none=True)
            del x
        return values

    counters = way.compare(program)
    assert counters["promotions"] > 0
    assert counters["plain_calls"] <= 2 * 2 * 6  # two rounds, at most
    assert counters["recordings"] <= 4 * 2 * 6


def test_layers_that_are_gathered_copy_what_they_share_and_hand_on(way, monkeypatch):
    """They have one signature: that all of them read something in one place says nothing of the next step."""
    monkeypatch.setattr(signature, "_SMALL_TANGENT", 1)
    monkeypatch.setattr(
        gathered, "_gathered", mock.MagicMock(**{"__contains__.return_value": True})
    )
    steps, num_layers = 24, 4

    def program(session):
        layers, values = [session.compiled(Scaled) for _ in range(num_layers)], []
        for x in session.batches(2, 6, 16, count=steps):
            scale = x[:1].detach().cos()
            for _, call in layers:
                x = call(x, scale)
            x.square().mean().backward()
            for module, _ in layers:
                values += programs.gradients(module)
                module.zero_grad(set_to_none=True)
            del x
        return values

    counters = way.compare(program)
    assert_replays(counters)
    calls = 2 * num_layers
    assert (counters["warmups"], counters["recordings"]) == (calls, calls)
    assert (counters["replays"], counters["promotions"]) == ((steps - 1) * calls, 0)
