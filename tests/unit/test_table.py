"""How many recordings there may be, which give way, and what is said about it."""

import logging

import pytest
import torch
from expecttest import assert_expected_inline

from cgpass.errors import StaticInputMovedError
from cgpass.runtime import stationary
from tests.unit.runners import COPIED, OPAQUE, POOLED, STATIC, SYMINT, call, counts, runner


def scaled(x, n):
    return [x * n]


def weighted(x, w):
    return [x + w]


X = torch.ones(2)


def tensors(count):
    return [torch.full((2,), float(i)) for i in range(count)]


def test_shapes_beyond_the_limit_run_plainly_and_known_ones_replay():
    run = runner(scaled, COPIED, SYMINT, max_recordings=2)
    for n in (1, 1, 2, 2):
        call(run, X, n)
    assert counts(run) == (2, 2, 2, 0)
    for n in range(3, 8):
        assert call(run, X, n) == [[n, n]]
    assert counts(run) == (2, 2, 2, 5)
    for n in (1, 2, 1):
        assert call(run, X, n) == [[n, n]]
    assert counts(run) == (2, 2, 5, 5)


def test_more_layers_than_sets_do_not_thrash():
    weights = tensors(10)
    run = runner(weighted, COPIED, STATIC, max_static_sets=4)
    for _ in range(12):
        for number, weight in enumerate(weights):
            assert call(run, X, weight) == [[number + 1.0] * 2]
    warmups, recordings, replays, plain = counts(run)
    assert (warmups, recordings) == (10, 4)
    assert replays + plain + warmups == 120
    assert replays == 4 * 11, "each recorded set replays in every round but the first"


def test_an_idle_set_makes_room_and_a_used_one_does_not(monkeypatch):
    monkeypatch.setattr(stationary, "CALLS", 100)
    used, idle, new = tensors(3)
    run = runner(weighted, COPIED, STATIC, max_static_sets=2)
    for weight in (used, used, idle, idle):
        call(run, X, weight)
    assert run.stats.recordings == 2
    for _ in range(16):
        call(run, X, used)
    for _ in range(2):
        call(run, X, new)
    assert counts(run)[1] == 3
    assert [recording.last_used for recording in run.table.all()] == [20, 22]
    call(run, X, used)
    assert counts(run) == (3, 3, 20, 0)


def test_a_set_is_not_idle_before_its_time():
    used, other, new = tensors(3)
    run = runner(weighted, COPIED, STATIC, max_static_sets=2)
    for weight in (used, used, other, other, *[used] * 13, new, new):
        call(run, X, weight)
    assert counts(run) == (2, 2, 15, 2)


def test_an_idle_shape_makes_room():
    run = runner(scaled, COPIED, SYMINT, max_recordings=1)
    for n in [1, 1, *[2] * 12]:
        assert call(run, X, n) == [[n, n]]
    warmups, recordings, _, plain = counts(run)
    assert (warmups, recordings, plain) == (2, 2, 8)
    assert len(run.table.all()) == 1


def test_a_dropped_recording_gives_its_memory_back():
    run = runner(scaled, COPIED, SYMINT, max_recordings=1)
    for n in [1, 1, *[2] * 12]:
        call(run, X, n)
    (recording,) = run.table.all()
    assert [run.owner.is_pool_storage(t) for t in recording.memory.tensors] == [True]
    run.close()
    assert not run.table.all()
    assert not run.owner.is_pool_storage(recording.memory.tensors[0])


def test_other_tensors_warm_up_once_and_are_no_rerecording():
    run = runner(weighted, COPIED, STATIC, max_rerecords=0)
    weights = tensors(4)
    for _ in range(3):
        for number, weight in enumerate(weights):
            assert call(run, X, weight) == [[number + 1.0] * 2]
    assert counts(run) == (4, 4, 8, 0)
    assert run.stats.rerecordings == 0


def test_the_same_object_at_another_address_is_a_rerecording():
    run = runner(weighted, COPIED, STATIC, max_rerecords=2)
    weight, kept = torch.zeros(2), []
    for _ in range(2):
        call(run, X, weight)
    for number in range(5):
        kept.append(weight.data)
        weight.data = torch.full((2,), float(number))
        assert call(run, X, weight) == [[number + 1.0] * 2]
    assert counts(run) == (1, 3, 3, 3)
    assert run.stats.rerecordings == 2
    for data in kept[:3]:
        weight.data = data
        assert call(run, X, weight) == [(X + data).tolist()], "known addresses replay"
    assert counts(run) == (1, 3, 6, 3)


def test_reset_allows_as_many_rerecordings_as_before(caplog):
    run = runner(weighted, COPIED, STATIC, max_rerecords=1)
    weight, kept = torch.zeros(2), []

    def move(times):
        for _ in range(times):
            kept.append(weight.data)
            weight.data = weight.data.clone()
            for _ in range(2):
                call(run, X, weight)

    move(4)
    before = run.stats.recordings
    assert len(messages(caplog)) == 1
    run.owner.release()
    move(4)
    assert run.stats.recordings - before == before == 2
    assert len(messages(caplog)) == 2, "the limit is told of again"


def test_a_second_recording_of_one_set_is_no_rerecording():
    run = runner(lambda x, w: [x + w], COPIED, STATIC)
    run.visible, run.read = frozenset(), frozenset({0})
    weight = torch.zeros(2)
    held = [run.run([X, weight])[0] for _ in range(4)]
    assert counts(run) == (1, 3, 3, 0)
    assert run.stats.rerecordings == 0
    assert all(torch.equal(out, X) for (out,) in held)


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_the_warning_about_rerecordings_names_option_inputs_and_lines(caplog):
    run = runner(weighted, COPIED, STATIC, max_rerecords=1)
    weight, kept = torch.zeros(2), []
    for _ in range(2):
        call(run, X, weight)
    for _ in range(4):
        kept.append(weight.data)
        weight.data = weight.data.clone()
        call(run, X, weight)
    (message,) = messages(caplog)
    assert_expected_inline(
        message,
        """forward captured_0 has as many recordings as max_rerecords=1 allows: calls with other shapes or addresses run without a graph, known ones keep replaying. In 4 calls: x1 (float32[2], moved 2 times, read at model.py:1 in forward: code). Raise the option, or keep shapes and addresses fixed.""",
    )


def test_the_warning_about_sets_names_what_differs(caplog):
    run = runner(weighted, COPIED, STATIC, max_static_sets=1)
    for weight in tensors(3) * 2:
        call(run, X, weight)
    (message,) = messages(caplog)
    assert "max_static_sets=1" in message
    assert "x1 (float32[2], read at model.py:1 in forward: code)" in message


def test_the_warning_about_shapes_comes_once(caplog):
    run = runner(scaled, COPIED, SYMINT, max_recordings=1)
    for n in (1, 1, 2, 3, 4):
        call(run, X, n)
    (message,) = messages(caplog)
    assert "max_recordings=1" in message


def test_error_says_which_input_moved():
    run = runner(weighted, COPIED, STATIC, settings={"static_input_check": "error"})
    weight = torch.zeros(2)
    call(run, X, weight)
    call(run, X, weight)
    with pytest.raises(StaticInputMovedError) as error:
        call(run, X, weight.clone())
    assert_expected_inline(
        str(error.value),
        """forward captured_0: static inputs moved or were replaced since they were recorded: x1 (float32[2], moved once, read at model.py:1 in forward: code). Write new values into parameters and buffers (copy_, load_state_dict without assign=True), or use static_input_check="rerecord".""",
    )
    assert call(run, X, weight) == [[1, 1]]


def test_other_sets_are_no_error_where_modules_share_code():
    settings = {"static_input_check": "error", "other_sets": True}
    run = runner(weighted, COPIED, STATIC, settings=settings)
    first, second, third = weights = tensors(3)
    for _ in range(3):
        for number, weight in enumerate(weights):
            assert call(run, X, weight) == [[number + 1.0] * 2]
    assert counts(run) == (3, 3, 6, 0)
    for weight in (second, first, third):
        kept = weight.data
        weight.data = kept.clone()
        with pytest.raises(StaticInputMovedError, match="x1"):
            call(run, X, weight)
        weight.data = kept
        assert call(run, X, weight) == [(X + kept).tolist()]


def test_off_never_looks_at_addresses():
    run = runner(weighted, COPIED, STATIC, settings={"static_input_check": "off"})
    weight = torch.zeros(2)
    call(run, X, weight)
    call(run, X, weight)
    assert call(run, X, torch.full((2,), 5.0)) == [[1, 1]]
    assert counts(run) == (1, 1, 2, 0)


def test_pooled_inputs_that_move_are_not_reported_as_moved_parameters():
    first = runner(lambda x: [x * 2], COPIED)
    second = runner(
        lambda a: [a + 1], POOLED, owner=first.owner, settings={"static_input_check": "error"}
    )
    held = []
    for _ in range(5):
        (a,), _ = first.run([X])
        held.append((a, second.run([a])[0]))
    assert all(out[0].tolist() == [3, 3] for _, out in held)
    assert second.stats.plain_calls == 0


def test_an_object_in_the_place_of_a_freed_one_is_another():
    class Factor:
        def __init__(self, value):
            self.value = value

    run = runner(lambda x, factor: [x * factor.value], COPIED, OPAQUE)
    for value in (1, 1, 1, 2, 2, 3, 3):
        assert call(run, X, Factor(value)) == [[value, value]]
