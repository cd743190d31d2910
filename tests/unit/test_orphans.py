"""Recordings of models that are gone give way before others are made: a table with recordings that hold nothing."""

import gc
import weakref

import pytest
import torch

from cgpass.runtime.limits import Limits
from cgpass.runtime.signature import Layout
from cgpass.runtime.table import RecordingTable
from cgpass.telemetry import CallStats
from tests.unit.runners import COPIED, STATIC, SYMINT, call, infos, runner

X = torch.ones(2)


class FakeRecording:
    def __init__(self, name, clock):
        self.name = name
        self.last_used = clock
        self.is_orphaned = False
        self.parameters = ()

    def note_parameters(self, parameters):
        self.parameters = tuple(parameters)


class Session:
    """Calls of models with one parameter each, recorded as a runner would."""

    def __init__(self, **limits):
        self.layout = Layout(infos(COPIED, STATIC, SYMINT), check_static=True, check_layout=False)
        self.stats = CallStats()
        self.table = RecordingTable(
            "forward captured_0",
            self.layout,
            Limits(**limits),
            self.stats,
            on_moved="rerecord",
            other_sets=True,
        )

    def record(self, name, parameter, size=1, *, warms_up=True):
        """Records a call if there is room; returns its recording and the names of those that gave way."""
        self.stats.calls += 1
        args = [X, parameter, size]
        keys = self.layout.shape_key(args), self.layout.static_key(args)
        if warms_up:
            self.table.add_warmup(*keys, self.table.identities(args))
        room, dropped = self.table.make_room(*keys, args)
        gone = [recording.name for recording in dropped]
        if not room:
            return None, gone
        recording = FakeRecording(name, self.stats.calls)
        self.table.add(*keys, args, recording)
        return recording, gone

    def names(self):
        return [recording.name for recording in self.table.all()]


def parameters(count):
    return [torch.full((2,), float(i)) for i in range(count)]


def test_of_models_that_are_gone_the_last_ones_stay():
    session, kept = Session(), parameters(12)
    gone = []
    for number, parameter in enumerate(kept):
        recording, dropped = session.record(number, parameter)
        gone += dropped
        assert recording.parameters == (parameter,)
        recording.is_orphaned = True
    assert gone == [0, 1, 2, 3, 4, 5, 6]
    assert session.names() == [7, 8, 9, 10, 11]


def test_the_longest_unused_go_first():
    session, kept = Session(), parameters(7)
    made = [session.record(number, parameter)[0] for number, parameter in enumerate(kept)]
    for recording in made[:6]:
        recording.is_orphaned = True
    made[0].last_used = 100
    _, gone = session.record("new", torch.zeros(2))
    assert gone == [1, 2]
    assert session.names() == [0, 3, 4, 5, 6, "new"]


def test_whose_parameters_live_or_whose_outputs_are_held_stays():
    session, kept = Session(), parameters(12)
    for number, parameter in enumerate(kept):
        assert session.record(number, parameter)[1] == []
    assert session.names() == list(range(12))


def test_all_shapes_of_a_model_go():
    session, kept = Session(), parameters(4)
    for size in (1, 2, 3):
        for number, parameter in enumerate(kept):
            session.record(f"{number} at {size}", parameter, size)
    for recording in session.table.all():
        recording.is_orphaned = True
    _, gone = session.record("new", torch.zeros(2), 9)
    assert len(gone) == 8
    assert session.names() == ["0 at 3", "1 at 3", "2 at 3", "3 at 3", "new"]


def test_another_recording_of_a_known_set_drops_nothing():
    session, kept = Session(), parameters(6)
    for number, parameter in enumerate(kept):
        session.record(number, parameter)
    for recording in session.table.all():
        recording.is_orphaned = True
    assert session.record("again", kept[0])[1] == []


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3, 4, 5, 6)], ids=["one shape", "several"])
def test_a_parameter_that_gets_new_memory_all_the_time_reaches_the_limit(sizes):
    """Its old memory is gone each time: what it loses must not count as never recorded."""
    session, parameter, kept = Session(max_rerecords=5), torch.zeros(2), []
    for size in sizes:
        session.record("one", parameter, size)
    made = 0
    for _ in range(10):
        kept.append(parameter.data)
        parameter.data = parameter.data.clone()
        for size in sizes:
            recording, _ = session.record("one", parameter, size, warms_up=False)
            made += recording is not None
        for recording in session.table.all():
            recording.is_orphaned = True
    assert made == session.stats.rerecordings == 5


def test_memory_that_comes_back_after_its_recording_went_counts():
    session, parameter = Session(max_rerecords=50), torch.zeros(2)
    places = [torch.zeros(2) for _ in range(8)]
    session.record("one", parameter)
    made = 0
    for number in range(40):
        parameter.data = places[number % len(places)].data
        recording, _ = session.record("one", parameter, warms_up=False)
        made += recording is not None
        for other in session.table.all():
            other.is_orphaned = True
    assert session.stats.rerecordings == made > 20


def test_recordings_of_models_that_were_dropped_go_with_the_simulated_driver_too():
    run = runner(lambda x, w: [x + w], COPIED, STATIC, settings={"other_sets": True})
    gone, kept = [], []
    for number in range(20):
        weight = torch.full((2,), float(number))
        kept.append(torch.empty(1024))  # so that addresses differ
        gone.append(weakref.ref(weight))
        for _ in range(3):
            assert call(run, X, weight) == [[number + 1.0] * 2]
        del weight
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]
    assert all(recording.is_orphaned for recording in run.table.all())
    assert len(run.table.all()) <= 5


def other_models(count, width):
    """Sets of parameters, one after the other, of which all but one have `id`s that came before."""
    lasting = [torch.zeros(2) for _ in range(width - 1)]
    for number in range(count):
        yield [*lasting, torch.full((2,), float(number))]


def test_some_ids_that_come_back_make_no_move_of_other_parameters():
    """Python gives the addresses of what was freed to new objects."""
    run = runner(lambda x, v, w: [x + v + w], COPIED, STATIC, STATIC, settings={"other_sets": True})
    kept = []
    for v, w in other_models(6, 2):
        kept.append((v.data, w))
        v.data = torch.zeros(2)
        for _ in range(3):
            assert call(run, X, v, w) == [(X + v + w).tolist()]
    assert run.stats.rerecordings == 0
    assert (run.stats.warmups, run.stats.plain_calls) == (6, 0)
