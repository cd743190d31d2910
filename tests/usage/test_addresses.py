"""Parameters move: each set of addresses has its recording, and new places are copied once."""

import copy
import logging

import pytest
import torch

import cgpass
from tests.usage import programs
from tests.usage.programs import MLP, assert_steady


def step(module, call, batch):
    module.zero_grad(set_to_none=True)
    out = call(batch)
    out.square().mean().backward()
    return [out.detach(), *programs.gradients(module)]


def other_state(module, factor):
    found = copy.deepcopy(module.state_dict())
    for value in found.values():
        value.mul_(factor)
    return found


def assigned_states(session):
    """Two sets of parameters take turns."""
    module, call = session.compiled(MLP)
    states = [other_state(module, factor) for factor in (1.0, 0.5)]
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        module.load_state_dict(states[number // 2 % 2], assign=True)
        values += step(module, call, batch)
    return values


def replaced_data(session):
    """`p.data` is replaced by memory that stays alive: the same parameters at other addresses."""
    module, call = session.compiled(MLP)
    kept, values = [], []
    for number, batch in enumerate(session.batches(4, 8, count=9)):
        if number % 3 == 2:
            for parameter in module.parameters():
                kept.append(parameter.data)
                parameter.data = parameter.data * 0.5
        values += step(module, call, batch)
    return values


def test_a_known_set_of_parameters_replays_at_once(setting):
    counters = setting.compare(assigned_states)
    assert counters["recordings"] == 4, counters
    assert counters["rerecordings"] == 0, counters
    assert counters["plain_calls"] == 0, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"], counters


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_replaced_data_is_recorded_again(setting, compiler):
    counters = setting.compare(replaced_data, compiler=compiler)
    # a move costs a call without a graph and a recording, and the recording that copies is made once
    assert_steady(counters, captured=2, recordings=8, rerecordings=6, warmups=7)


def moved_in_every_call(session):
    module, call = session.compiled(MLP)
    kept, values = [], []
    with torch.no_grad():
        for batch in session.batches(4, 8, count=12):
            for parameter in module.parameters():
                kept.append(parameter.data)
                parameter.data = parameter.data * 0.99
            values.append(call(batch))
    return values


def test_what_moves_in_every_call_is_copied_for_good(setting, caplog):
    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(moved_in_every_call)
    assert (counters["warmups"], counters["plain_calls"]) == (2, 0), counters
    assert counters["recordings"] == 1, counters
    assert not caplog.records


def test_more_than_max_copied_mib_runs_without_a_graph_with_one_warning(setting, caplog):
    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(moved_in_every_call, max_copied_mib=0)
    assert counters["recordings"] == 0, counters
    warned = [r.getMessage() for r in caplog.records if "max_copied_mib=0" in r.getMessage()]
    assert len(warned) == 1, warned
    assert "layers.0.weight" in warned[0]


def test_layers_that_share_one_function_do_not_thrash(setting):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([MLP() for _ in range(5)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def program(session):
        module = session.module(Model)
        for layer in module.layers:
            layer.forward = session.compile(layer.forward)
        values = []
        for batch in session.batches(4, 8):
            values += step(module, module, batch.requires_grad_())
        return values

    counters = setting.compare(program)
    # Every layer's forward and backward warms up in the first step and is recorded in the second; the backwards are
    # recorded once more, since the gradients are kept over the next forward.
    assert_steady(counters, captured=2, recordings=15, warmups=10)


def test_sizes_beyond_max_recordings_run_plainly_and_known_ones_replay(setting, caplog):
    def program(session):
        _, call = session.compiled(MLP, dynamic=True)
        values = []
        with torch.no_grad():
            for size in [9, 8, 9, 8, *range(2, 8), 9, 8, 9, 8]:
                values.append(call(session.randn(size, 8)))
        return values

    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(program, max_recordings=2)
    assert counters["recordings"] == 2, counters
    assert counters["plain_calls"] == 6, counters
    assert counters["replays"] == 6, counters
    assert counters["warmups"] == 2, counters
    assert len([r for r in caplog.records if "max_recordings=2" in r.getMessage()]) == 1


def test_reset_frees_recordings_and_functions_stay_usable(setting):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=9)):
            if number in (3, 6):
                cgpass.reset()
            values += step(module, call, batch)
        return values

    assert_steady(setting.compare(program), captured=2, recordings=6, warmups=6)
