"""The simulated driver shows what goes wrong: each broken runtime fails a usage program that the real one passes."""

import pytest
import torch

from cgpass.runtime import recording as recording_module
from cgpass.runtime.liveness import LiveOutputs
from cgpass.runtime.recording import Placeholder, Recording
from cgpass.runtime.runner import PartitionRunner
from cgpass.runtime.signature import Layout
from cgpass.runtime.simulated import SimulatedDriver, SimulatedGraph
from tests.usage.programs import Setting
from tests.usage.test_addresses import assigned_states, replaced_data
from tests.usage.test_holding import held_outputs, interleaved, pending_forwards
from tests.usage.test_inputs import mutated_input, two_inputs
from tests.usage.test_randomness import dropout_training

SIMULATED = Setting(torch.device("cpu"), "simulated")


def no_input_copy(patch):
    """Inputs are read where the recording's call had them."""
    patch.setattr(Recording, "copy_in", lambda self, args: None)


def no_copy_out(patch):
    """The user gets the pool's memory."""
    patch.setattr(Recording, "copy_out", lambda self, positions, targets, results: 0)


def no_address_check(patch):
    """Whatever was recorded first is replayed, wherever parameters are now."""
    patch.setattr(Layout, "static_key", lambda self, args: tuple(0 for _ in self.static))


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


def shared_placeholder(patch):
    """Two inputs of one layout share their placeholder."""

    def shared(self, index, value):
        key = (value.size(), value.stride(), value.dtype)
        return self._placeholders.setdefault(key, Placeholder(value))

    patch.setattr(PartitionRunner, "_placeholder", shared)


def no_write_back(patch):
    """What a graph writes into a placeholder stays there."""
    seal = Recording.seal

    def seal_without_write_back(self):
        self._write_back = []
        seal(self)

    patch.setattr(Recording, "seal", seal_without_write_back)


def live_check_off(patch):
    """Saved tensors of a pending forward are overwritten by the next forward."""
    patch.setattr(LiveOutputs, "youngest", lambda self: -1)


def birth_order_ignored(patch):
    """A recording is replayed whenever its own outputs are free, though a younger one may lie on its temporaries."""
    run = PartitionRunner.run

    def youngest(self):
        return -1

    def run_if_own_outputs_are_free(self, args):
        def free(recordings):
            return [r for r in recordings if r.held is None or not r.held.any_held()]

        find = self.table.find
        self.table.find = lambda *key: free(find(*key))
        self._last = None
        try:
            return run(self, args)
        finally:
            del self.table.find

    patch.setattr(LiveOutputs, "youngest", youngest)
    patch.setattr(PartitionRunner, "run", run_if_own_outputs_are_free)


def wrong_alias(patch):
    """An output that is a view of an input is the one of the recorded input."""

    def own(output, inputs, by_storage):
        return output.detach()

    patch.setattr(recording_module, "_own_or_alias", own)


def returns_views_of_its_input(session):
    """A wrapped function that returns a view of its input."""

    def fn(x, y):
        x.add_(y)
        return x.view(-1)[2:], x

    call = session.wrap(fn)
    values = []
    for _ in range(6):
        x, y = session.randn(4, 4), session.randn(4, 4)
        part, same = call(x, y)
        values += [x, part, same, part.data_ptr() - x.data_ptr(), same.data_ptr() == x.data_ptr()]
    return values


def kept_saved_tensors(session):
    """Forwards, all their backwards but the youngest's, and again."""
    return [*interleaved(session), *pending_forwards((2, 0, 1))(session)]


WRONG = "differ from the run without graphs|has been modified by an inplace operation"
"""Autograd itself sees a saved tensor overwritten, since a simulated replay counts as a write."""

BROKEN = [
    (no_input_copy, two_inputs),
    (no_copy_out, held_outputs),
    (no_address_check, assigned_states),
    (no_address_check, replaced_data),
    (frozen_rng, dropout_training),
    (shared_placeholder, two_inputs),
    (no_write_back, mutated_input),
    (live_check_off, interleaved),
    (live_check_off, pending_forwards((0, 1, 2))),
    (birth_order_ignored, kept_saved_tensors),
    (wrong_alias, returns_views_of_its_input),
]


@pytest.mark.parametrize(
    ("break_it", "program"), BROKEN, ids=lambda f: f.__qualname__.split(".")[0]
)
def test_a_broken_runtime_gives_wrong_numbers(monkeypatch, break_it, program):
    SIMULATED.compare(program)
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises((AssertionError, RuntimeError), match=WRONG):
            SIMULATED.compare(program)
