"""The simulated driver shows what goes wrong: each broken runtime fails a usage program that the real one passes."""

import functools
from array import array

import pytest
import torch

from cgpass.runtime import fast
from cgpass.runtime import recording as recording_module
from cgpass.runtime.inputs import Layout
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording
from cgpass.runtime.simulated import SimulatedDriver, SimulatedGraph
from tests.usage import programs
from tests.usage.programs import Block, Setting
from tests.usage.test_addresses import assigned_states
from tests.usage.test_any_order import (
    backward_into_chosen_inputs_only,
    graph_retained_later,
    interleaved,
)
from tests.usage.test_holding import held_outputs
from tests.usage.test_randomness import dropout_training
from tests.usage.test_same_numbers import mutated_input

SIMULATED = Setting(torch.device("cpu"), "simulated")


def no_input_copy(patch):
    """Inputs are read where the recording's call had them."""
    patch.setattr(recording_module, "copy_in", lambda copies, args: None)


def no_rescue(patch):
    """Outputs in a replay's way are said to be moved, and are not."""
    patch.setattr(Owner, "rescue", lambda self, recording: True)


def consumption_unchecked(patch):
    """A backward that writes on saved tensors is replayed though a second one is to come."""
    patch.setattr(fast, "exclusive", lambda args, positions, counts: True)


def released_blocks_forgotten(patch):
    """A recording does not know which older outputs it may lie on."""
    begin = Owner.begin_recording

    def begin_and_forget(self, pool_index):
        begin(self, pool_index)
        return {}

    patch.setattr(Owner, "begin_recording", begin_and_forget)


def always_safe(patch):
    """Nothing that is held is asked for."""
    patch.setattr(Owner, "is_safe", lambda self, recording: True)


def no_address_check(patch):
    """Whatever was recorded first is replayed, wherever parameters are now."""
    patch.setattr(Layout, "static_key", lambda self, args: bytes(8 * len(self.static)))


def stale_saved_tensor(patch):
    """A backward reads its saved tensors where they lay when it was recorded, not where this forward left them."""

    right = Layout.static_key

    def key(self, args):
        each = zip(self.static, array("q", right(self, args)), strict=True)
        return array("q", [0 if i in self.pooled else place for i, place in each]).tobytes()

    patch.setattr(Layout, "static_key", key)


def frozen_rng(patch):
    """Every replay draws the numbers of the recording, and the generator stays where it was."""
    record, replay = SimulatedDriver.record, SimulatedGraph.replay

    def record_with_state(self, fn, args, **settings):
        state = torch.get_rng_state()
        graph, outputs = record(self, fn, args, **settings)
        graph.frozen = state
        return graph, outputs

    def replay_from_state(self):
        before = torch.get_rng_state()
        torch.set_rng_state(self.frozen)
        replay(self)
        torch.set_rng_state(before)

    patch.setattr(SimulatedDriver, "record", record_with_state)
    patch.setattr(SimulatedGraph, "replay", replay_from_state)


def no_write_back(patch):
    """Writes into a placeholder stay there."""
    run = Recording.run

    def run_without_write_back(self, args):
        self._write_back = []
        return run(self, args)

    patch.setattr(Recording, "run", run_without_write_back)


def order_of_captures_ignored(patch):
    """A recording is replayed though outputs of younger ones, which may lie on its temporaries, are held."""

    def is_safe(self, recording):
        others = [
            other
            for index, _, other in self._pools[recording.pool_index].stack
            if index <= recording.capture_index
        ]
        return not any(
            other.memory.held(
                None if other is recording else recording.released.get(other.capture_index, ())
            )
            for other in others
        )

    patch.setattr(Owner, "is_safe", is_safe)


def outputs_held_over_the_backward(session):
    """Outputs are dropped before the backward in the first steps and held over it later."""
    module, call = session.compiled(Block)
    for number, batch in enumerate(session.batches(2, 6, 16)):
        out = call(batch)
        loss = out.sum()
        if number < 3:
            del out
        loss.backward()
        yield programs.gradients(module)
        if number >= 3:
            yield [out]


BROKEN = [
    (no_input_copy, interleaved),
    (no_rescue, held_outputs),
    (no_address_check, assigned_states),
    (stale_saved_tensor, interleaved),
    (frozen_rng, dropout_training),
    (no_write_back, mutated_input),
    (consumption_unchecked, graph_retained_later),
    (released_blocks_forgotten, outputs_held_over_the_backward),
    (always_safe, held_outputs),
    (order_of_captures_ignored, backward_into_chosen_inputs_only),
]


@functools.cache
def assert_right(program):
    """Once a program, however many ways there are to break it."""
    SIMULATED.compare(program, only_eager=True)


@pytest.mark.parametrize(
    ("break_it", "program"), BROKEN, ids=lambda f: f.__qualname__.split(".")[0]
)
def test_a_broken_runtime_gives_wrong_numbers(monkeypatch, break_it, program):
    assert_right(program)
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises(AssertionError, match="values not as in eager"):
            SIMULATED.compare(program, only_eager=True)
