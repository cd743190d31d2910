"""Copied inputs that never move are read where they lie, until they move."""

import logging

import pytest
import torch

from cgpass.inputs import InputInfo
from cgpass.runtime import stationary
from cgpass.runtime.owner import Owner
from cgpass.runtime.signature import Layout
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.starts import PATIENCE
from cgpass.runtime.stationary import Watch
from tests.unit.runners import COPIED, POOLED, STATIC, call, counts, runner

CALLS = 4


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(stationary, "CALLS", CALLS)


def tensors(n, size=3):
    return [torch.full((size,), float(i + 1)) for i in range(n)]


def noted(watch, *calls):
    return [watch.note(args) for args in calls]


# ---- what is found out


def test_what_never_moves_is_found():
    watch = Watch((0, 1))
    a, b = tensors(2)
    assert noted(watch, *[[a, b]] * CALLS) == [False] * CALLS
    assert watch.note([a, b])
    assert watch.stationary([a, b]) == (0, 1)


def test_what_moves_in_every_call_is_left_out():
    a, *moving = tensors(20)
    watch = Watch((0, 1))
    found = noted(watch, *([a, b] for b in moving))
    assert found.index(True) == stationary.MOVES + 1 + CALLS
    assert watch.positions == (0,)
    assert watch.stationary([a, moving[0]]) == (0,)


def test_nothing_is_left_to_watch():
    watch = Watch((0,))
    kept = tensors(8)
    assert not any(noted(watch, *([a] for a in kept)))
    assert watch.settled
    assert watch.stationary([kept[-1]]) == ()


def test_a_few_moves_are_forgiven():
    a, b, c = tensors(3)
    watch = Watch((0,))
    assert not any(noted(watch, *([x] for x in (a, a, b, b, c, c, c))))
    assert noted(watch, [c], [c]) == [False, True]


def test_settled_inputs_that_move_are_copied_for_good():
    a, b, c = tensors(3)
    watch = Watch((0, 1))
    noted(watch, *[[a, b]] * (CALLS + 1))
    assert watch.stationary([a, c]) == (0,)
    assert watch.stationary([a, b]) == (0,)


def test_what_a_recording_hands_on_may_lie_elsewhere_once_all_are_made_anew():
    a, b, c = tensors(3)
    watch = Watch((0, 1))
    noted(watch, *[[a, b]] * (CALLS + 1))
    assert watch.stationary([a, c], is_handed_on=lambda value: value is c) == (0, 1)
    assert watch.handed_on == {1}
    assert watch.stationary([a, c]) == (0, 1)


def test_results_that_were_made_anew_in_the_same_place_are_known_as_such():
    a, b = tensors(2)
    watch = Watch((0, 1))
    noted(watch, *[[a, b]] * (CALLS + 1))
    assert watch.stationary([a, b], is_handed_on=lambda value: value is b) == (0, 1)
    assert watch.handed_on == {1}


def test_where_results_were_found_to_move_none_is_read_where_it_lies():
    a, b = tensors(2)
    watch = Watch((0, 1))
    noted(watch, *[[a, b]] * (CALLS + 1))
    found = watch.stationary([a, b], is_handed_on=lambda value: value is b, results_stay=False)
    assert (found, watch.handed_on) == ((0,), set())
    assert watch.stationary([a, b]) == (0,)


def test_a_watch_of_nothing_is_settled():
    watch = Watch(())
    assert not watch.note([])
    assert watch.stationary([]) == ()


# ---- recordings


def times(x, w):
    return [x * w]


def test_an_input_that_stays_is_copied_no_more(caplog):
    caplog.set_level(logging.INFO)
    run = runner(times, COPIED, STATIC)
    x, w = tensors(2)
    copied = []
    for number in range(12):
        x.fill_(number)
        before = run.stats.copied_bytes
        assert call(run, x, w) == [[2.0 * number] * 3]
        copied.append(run.stats.copied_bytes - before)
    assert copied == [0, *[12] * (CALLS + 2), *[0] * (9 - CALLS)]
    assert counts(run) == (1, 2, 11, 0)
    assert (run.stats.promotions, run.stats.rerecordings) == (1, 0)
    assert len(run.table.all()) == 1
    assert "had not moved until then: x0 (read at model.py:0 in forward: code)" in caplog.text


def test_an_input_that_moves_after_all_is_copied_again(caplog):
    caplog.set_level(logging.INFO)
    run = runner(times, COPIED, STATIC)
    x, w, *others = tensors(30)
    for _ in range(10):
        call(run, x, w)
    assert run.stats.promotions == 1
    x.fill_(float("nan"))
    for other in others:
        assert call(run, other, w) == [(other * 2).tolist()]
        assert call(run, other, w) == [(other * 2).tolist()]
    assert (run.stats.promotions, run.stats.recordings, run.stats.plain_calls) == (1, 3, 0)
    assert (
        "x0 (read at model.py:0 in forward: code) moved, and is copied from now on" in caplog.text
    )
    before = run.stats.copied_bytes
    for _ in range(10):
        call(run, others[0], w)
    assert run.stats.copied_bytes - before == 120
    assert run.stats.recordings == 3


def recordings_after_moves(moves):
    """How many there are, and how many pools, after one of so many inputs that stayed moved, and then the next one."""
    owner = Owner(SimulatedDriver())
    run = runner(lambda *args: [sum(args)], *[COPIED] * moves, owner=owner)
    places = tensors(moves)
    for _ in range(10):
        call(run, *places)
    found = []
    for number in range(moves):
        places[number] = torch.ones(3)
        for _ in range(3):
            assert call(run, *places) == [sum(places).tolist()]
        found.append((len(run.table.all()), len(owner._slots)))
    return found


def test_inputs_may_move_one_after_the_other_with_one_recording_left(monkeypatch):
    monkeypatch.setattr("cgpass.runtime.starts.MAX_STARTS", 1)
    assert recordings_after_moves(4) == [(1, 1)] * 4


def test_moves_without_end_leave_recordings_beside(monkeypatch):
    monkeypatch.setattr("cgpass.runtime.starts.MAX_STARTS", 1)
    monkeypatch.setattr("cgpass.runtime.rerecording._MOST_MOVES", 2)
    assert [recordings for recordings, _ in recordings_after_moves(4)] == [1, 1, 2, 3]


def test_only_what_moves_is_copied_again():
    run = runner(lambda x, y: [x * y], COPIED, COPIED)
    x, y, z = tensors(3)
    for _ in range(10):
        call(run, x, y)
    before = run.stats.copied_bytes
    for _ in range(5):
        assert call(run, x, z) == [[3.0] * 3]
    assert run.stats.copied_bytes - before == 5 * 12


def test_each_set_of_parameters_has_inputs_of_its_own():
    """Layers that share one partition: each one's input stays where it is."""
    run = runner(times, COPIED, STATIC)
    weights, inputs = tensors(3), tensors(3)
    for _ in range(10):
        for x, w in zip(inputs, weights, strict=True):
            assert call(run, x, w) == [(x * w).tolist()]
    assert (run.stats.promotions, run.stats.recordings, run.stats.plain_calls) == (3, 6, 0)
    assert len(run.table.all()) == 3


def test_a_written_input_is_written_where_it_lies():
    run = runner(lambda x: [x.add_(1) * 2], COPIED, mutated=(0,))
    x = torch.zeros(3)
    versions = []
    for number in range(10):
        assert call(run, x) == [[2.0 * (number + 1)] * 3]
        assert x.tolist() == [number + 1.0] * 3
        versions.append(x._version)
    assert versions == sorted(set(versions)), "autograd knows of every write"
    assert run.stats.promotions == 1
    y = torch.zeros(3)
    assert call(run, y) == [[2.0] * 3]
    assert (x.tolist(), y.tolist()) == ([10.0] * 3, [1.0] * 3)


def test_empty_inputs_are_not_worth_a_recording():
    run = runner(lambda x: [x * 2], COPIED)
    x = torch.empty(0, 3)
    for _ in range(10):
        assert call(run, x) == [[]]
    assert run.stats.promotions == 0


def test_small_gradients_of_outputs_are_not_worth_a_recording():
    infos = [InputInfo(name, COPIED, is_tangent=name != "x") for name in ("x", "loss", "logits")]
    layout = Layout(infos, check_static=True, check_layout=True)
    args = [torch.ones(()), torch.ones(()), torch.ones(256, 64)]
    assert layout.may_stay(args) == (0, 2)


def test_one_more_set_than_allowed_is_not_needed():
    run = runner(times, COPIED, STATIC, max_static_sets=1, max_recordings=1)
    x, w, other = tensors(3)
    for value in [*[x] * 10, *[other] * 10]:
        assert call(run, value, w) == [(value * w).tolist()]
    assert counts(run) == (1, 3, 19, 0)


def pipeline():
    """A forward whose output is saved for a backward that gets one more input."""
    owner = Owner(SimulatedDriver())
    forward = runner(lambda x: [x * 2], COPIED, owner=owner)
    backward = runner(lambda a, y: [a + y], POOLED, COPIED, owner=owner)
    return forward, backward


def step(forward, backward, x, y):
    (a,), _ = forward.run([x])
    assert call(backward, a, y) == [(x * 2 + y).tolist()]


def test_all_are_recorded_anew_between_two_steps():
    forward, backward = pipeline()
    y, *moving = tensors(14)
    for x in moving:
        step(forward, backward, x, y)
    assert counts(forward) == counts(backward) == (1, 2, 12, 0)
    assert (forward.stats.promotions, backward.stats.promotions) == (0, 1)
    assert {r.slot for run in (forward, backward) for r in run.table.all()} == {0}


def test_a_call_runs_plainly_where_nothing_can_be_dropped():
    """What the forward saved is needed where it lies: the next forward is the time to start over."""
    forward, backward = pipeline()
    x, y, z = tensors(3)
    for _ in range(10):
        step(forward, backward, x, y)
    assert backward.stats.promotions == 1
    for _ in range(10):
        step(forward, backward, x, z)
    assert counts(forward) == (1, 3, 19, 0)
    assert counts(backward) == (1, 3, 18, 1)
    assert {r.slot for run in (forward, backward) for r in run.table.all()} == {0}


def test_a_move_in_a_long_step_is_over_after_it():
    """What is held until the step's end is not held for ever, however many partitions run before that."""
    owner = Owner(SimulatedDriver())
    runs = [runner(times, COPIED, STATIC, owner=owner) for _ in range(6 * PATIENCE)]
    for run in runs:
        run.visible, run.read = frozenset(), frozenset({0})
    inputs, w = tensors(len(runs)), torch.ones(3)

    def plain_calls():
        before = sum(run.stats.plain_calls for run in runs)
        held = [run.run([x, w])[0][0] for run, x in zip(runs, inputs, strict=True)]
        assert [out.tolist() for out in held] == [x.tolist() for x in inputs]
        return sum(run.stats.plain_calls for run in runs) - before

    for _ in range(3 * CALLS):
        plain_calls()
    assert all(run.stats.promotions == 1 for run in runs)
    inputs[1] = torch.full((3,), 7.0)
    assert [plain_calls() for _ in range(4)] == [1, 0, 0, 0]
    assert [len(run.table.all()) for run in runs] == [1] * len(runs)
    assert len(owner._slots) == 1


def test_where_something_is_always_held_the_call_is_recorded_beside():
    run = runner(times, COPIED, STATIC)
    x, w, y = tensors(3)
    for _ in range(10):
        call(run, x, w)
    assert run.stats.promotions == 1
    run.visible, run.read = frozenset(), frozenset([0])
    held, _ = run.run([x, w])
    for _ in range(2 * PATIENCE + 4):
        assert call(run, y, w) == [(y * w).tolist()]
    warmups, recordings, _, plain = counts(run)
    assert (warmups, recordings) == (1, 3)
    assert 0 < plain <= 2 * PATIENCE
    assert held[0].tolist() == (x * w).tolist()


def test_what_was_recorded_beside_goes_once_nothing_is_held_and_another_input_moves():
    run = runner(lambda x, y: [x * y], COPIED, COPIED)
    other = runner(lambda x: [x - 1], COPIED, owner=run.owner)
    other.visible, other.read = frozenset(), frozenset({0})
    x, y, *others = tensors(4)
    for _ in range(20):
        call(other, x)
        call(run, x, y)
    held, _ = other.run([x])
    for _ in range(2 * PATIENCE + 4):
        assert call(run, others[0], y) == [(others[0] * y).tolist()]
    plain = run.stats.plain_calls
    assert len(run.table.all()) > 1
    del held
    for _ in range(4):
        assert call(run, *others) == [(others[0] * others[1]).tolist()]
    assert run.stats.plain_calls == plain, "it is recorded at once"
    assert (len(run.table.all()), len(run.owner._slots)) == (1, 1)


def test_where_other_results_are_always_held_the_call_is_recorded_beside():
    """Those of another partition, which change from call to call."""
    run = runner(times, COPIED, STATIC)
    other = runner(lambda x: [x - 1], COPIED, owner=run.owner)
    other.visible, other.read = frozenset(), frozenset({0})
    x, w, y = tensors(3)
    for _ in range(40):
        call(run, x, w)
    assert run.stats.promotions == 1
    held = []
    for step in range(90):
        held = [*held[-1:], other.run([x])[0]]
        given = x if step < 10 else y
        assert call(run, given, w) == [(given * w).tolist()]
    assert 0 < run.stats.plain_calls <= 2 * PATIENCE + 2


def test_an_input_in_the_pool_is_read_there_and_rescued():
    """A function of its own result: what it reads is what its replay would overwrite."""
    run = runner(lambda x: [x + 1], COPIED)
    x = torch.zeros(3)
    for _ in range(40):
        (x,), _ = run.run([x])
    assert x.tolist() == [40.0] * 3
    assert run.stats.plain_calls == 0
