"""Ways to replace parameters and buffers in every single call."""

import copy

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP


class Recurrent(nn.Module):
    """Keeps its state in a buffer that is another tensor after every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(2, 8))

    def forward(self, x):
        self.state = torch.tanh(self.linear(x) + self.state.detach())
        return self.state * 2


def test_a_buffer_is_replaced_in_the_forward(way, caplog):
    def program(session):
        module, call = session.compiled(Recurrent)
        module.requires_grad_(False)
        values = []
        for batch in session.batches(2, 8, count=300):
            values += [call(batch).clone(), module.state.clone()]
        return values

    counters = way.compare(program)
    assert counters["warmups"] == 2
    assert counters["recordings"] == 1
    assert counters["replays"] == 298
    assert not caplog.records


def test_a_buffer_is_replaced_in_the_forward_and_every_value_kept(way):
    def program(session):
        module, call = session.compiled(Recurrent)
        module.requires_grad_(False)
        kept = []
        for batch in session.batches(2, 8, count=60):
            call(batch)
            kept.append(module.state)
        return kept

    counters = way.compare(program)
    assert counters["recordings"] <= 2, counters
    assert counters["warmups"] <= 4, counters


def test_a_state_that_is_assigned_in_every_call_and_kept(way):
    """Another module's parameters, or these at a new place? Either way nothing is recorded for one of them."""

    def program(session):
        module, call = session.compiled(MLP)
        states = [{k: v * 1.01 for k, v in module.state_dict().items()} for _ in range(150)]
        values = []
        with torch.no_grad():
            for state, batch in zip(states, session.batches(4, 8, count=150), strict=True):
                module.load_state_dict(state, assign=True)
                values.append(call(batch).clone())
        return values

    counters = way.compare(program)
    assert counters["recordings"] <= 1
    assert counters["replays"] + counters["warmups"] == 150


def test_modules_that_are_new_in_every_call_and_kept_are_warned_of(way, caplog):
    def program(session):
        first, values = session.module(MLP), []
        modules = [copy.deepcopy(first) for _ in range(150)]
        with torch.no_grad():
            for module, batch in zip(modules, session.batches(4, 8, count=150), strict=True):
                values.append(session.compile(module)(batch).clone())
        return values

    way.compare(program)
    assert len(caplog.records) == 1, caplog.text
    assert "layers.0.weight" in caplog.text


def test_a_buffer_is_replaced_in_the_forward_of_a_training_step(way):
    def program(session):
        module, call = session.compiled(Recurrent)
        values = []
        for batch in session.batches(2, 8, count=200):
            loss = call(batch).square().mean()
            loss.backward()
            values += [loss.detach(), module.state.detach().clone(), *programs.gradients(module)]
            module.state = module.state.detach()
            module.zero_grad()
        return values

    counters = way.compare(program)
    assert counters["warmups"] + counters["recordings"] + counters["plain_calls"] <= 10
    assert counters["replays"] >= counters["calls"] - 5


@pytest.mark.parametrize("training", [False, True])
def test_data_of_every_parameter_is_new_in_every_call(way, training):
    """As where weights are brought to the device for each call."""

    def program(session):
        module, call = session.compiled(MLP)
        values, kept = [], []
        for batch in session.batches(4, 8, count=80):
            for parameter in module.parameters():
                kept.append(parameter.data)
                parameter.data = parameter.data.clone()
            with torch.set_grad_enabled(training):
                out = call(batch).square().mean()
            values.append(out.detach())
            if training:
                out.backward()
                values += programs.gradients(module)
                module.zero_grad()
        return values

    counters = way.compare(program)
    assert counters["plain_calls"] == 0
    assert counters["recordings"] <= 2 * (1 + training)
    assert counters["replays"] >= counters["calls"] - 5


def test_every_call_has_parameters_of_its_own(way):
    def program(session):
        module, kept, values = session.module(MLP), [], []
        call = session.compile(lambda p, x: torch.func.functional_call(module, p, x))
        for batch in session.batches(4, 8, count=290):
            parameters = {name: p.detach() * 1.01 for name, p in module.named_parameters()}
            kept.append(parameters)
            values.append(call(parameters, batch).clone())
        return values

    assert way.compare(program)["replays"] > 0
