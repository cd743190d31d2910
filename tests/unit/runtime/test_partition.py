"""Warm-up, record, replay, and what happens when a capture fails or inputs are not where they were."""

import concurrent.futures
import logging
import threading

import numpy as np
import pytest
import torch

from cgpass.runtime.capturing import is_capturing_here as is_recording
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.table import RecordingTable
from tests.unit.runtime.runners import COPIED, POOLED, STATIC, SYMINT, call, counts, runner

X = torch.ones(2)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def sync(x):
    return [x * x.sum().item()]


def test_a_settled_call_looks_for_no_recordings(monkeypatch):
    run = runner(lambda w, x: [w * x], STATIC, COPIED)
    weight = torch.ones(2)
    for _ in range(2):
        call(run, weight, X)
    monkeypatch.delattr(RecordingTable, "get")
    monkeypatch.delattr(RecordingTable, "recordings")
    assert [call(run, weight, X * n) for n in range(2)] == [[[0, 0]], [[1, 1]]]


def test_a_thread_that_records_what_it_never_ran_is_prepared_first():
    prepared = []

    class Driver(SimulatedDriver):
        def prepare_thread(self):
            prepared.append(threading.get_ident())

    run = runner(lambda x: (x + 1,), COPIED, owner=Owner(Driver()))
    assert call(run, X) == call(run, X) == [[2.0, 2.0]]
    assert prepared == []
    run.forget_recordings()
    assert in_another_thread(call, run, X) == [[2.0, 2.0]]
    assert run.stats.recordings == 2
    assert len(prepared) == 1
    assert threading.get_ident() not in prepared


def in_another_thread(function, *args):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize(
    "on_failure", [None, lambda args, error: pytest.fail("nothing is to blame")]
)
def test_what_fails_in_a_thread_that_never_ran_it_is_tried_again(caplog, on_failure):
    made = threading.local()

    def fn(x):
        if is_recording() and not hasattr(made, "handle"):
            raise RuntimeError("no handle can be made here")
        made.handle = True
        return (x + 1,)

    run = runner(fn, COPIED, on_failure=on_failure)
    call(run, X)

    def twice():
        return call(run, X), call(run, X)

    assert in_another_thread(twice) == ([[2.0, 2.0]], [[2.0, 2.0]])
    assert counts(run) == (2, 1, 1, 0)
    assert warnings(caplog) == []


def test_what_fails_in_thread_after_thread_is_not_tried_forever(caplog):
    def fn(x):
        if is_recording():
            raise RuntimeError("never")
        return (x + 1,)

    run = runner(fn, COPIED)
    call(run, X)
    for _ in range(6):
        assert in_another_thread(call, run, X) == [[2.0, 2.0]]
    assert counts(run) == (2, 0, 0, 5)


# ---- Note [What a call does]: what was called before, and the row that the next call is


def scaled(**settings):
    """A partition of a static tensor and a number whose outputs a backward reads."""
    return runner(lambda x, w, n: [x * w * n], COPIED, STATIC, SYMINT, **settings)


def calls(*numbers, weights=1, **settings):
    """Calls with these numbers, of several modules in turn; the next call has the last of each."""
    run, all_weights = scaled(**settings), [torch.ones(2) for _ in range(weights)]
    for n in numbers:
        for w in all_weights:
            call(run, X, w, n)
    return run, [X, all_weights[-1], numbers[-1]], all_weights


def after(change):
    """Its owner is not as it was when the recording was made."""
    run, args, kept = calls(2, 2)
    change(run.owner)
    return run, args, kept


def captures(owner):
    owner.driver.is_capturing = lambda: True


def failed():
    run = runner(sync, COPIED, on_skip="silent")
    for _ in range(2):
        call(run, X)
    return run, [X], None


def without_memory():
    def fn(x, n):
        if n == 3 and is_recording():
            raise torch.OutOfMemoryError("no memory")
        return [x * n]

    run = runner(fn, COPIED, SYMINT)
    for n in (3, 3, 2, 2):
        call(run, X, n)
    return run, [X, 3], None


def back():
    """A tensor that lay elsewhere in between is back in a place where it was recorded."""
    run, (x, w, n), _ = calls(2, 2)
    here, w.data = w.data, torch.ones(2)
    for _ in range(2):
        call(run, x, w, n)
    kept, w.data = w.data, here
    return run, [x, w, n], kept


def pending(calls_held=1, **settings):
    """Results are held that a backward reads."""
    run, args, _ = calls(2, 2, **settings)
    run.uses = [(False, True)]
    run.forget_recordings()
    return run, args, [run.run(args.copy())[0] for _ in range(calls_held)]


def shown():
    """Results are held that the user alone reads."""
    run, args, _ = calls(2, 2)
    return run, args, run.run(args.copy())


def moved(times=1, **settings):
    """One call at each place."""
    run, (x, w, n), _ = calls(2, **settings)
    kept = [w.data]
    for _ in range(times):
        call(run, x, w, n)
        w.data = torch.ones(2)
        kept.append(w.data)
    return run, [x, w, n], kept


def stayed():
    run, args, kept = moved()
    call(run, *args)
    return run, args, kept


def without_room():
    run, (x, w, _), _ = calls(2, 2, max_recordings=1)
    return run, [x, w, 3], None


def other_module(numbers=(2, 2), seen=False):
    run, (x, w, n), _ = calls(*numbers, max_recordings=1)
    other = torch.ones(2)
    if seen:
        call(run, x, other, n)
    return run, [x, other, n], w


@pytest.mark.parametrize(
    ("row", "situation", "before", "after"),
    [
        (
            "1",
            lambda: after(lambda owner: vars(owner).update(bypassed="asked")),
            (1, 1, 1, 0),
            (1, 1, 1, 1),
        ),
        ("1", lambda: after(Owner.close), (1, 1, 1, 0), (1, 1, 1, 1)),
        ("1", lambda: after(captures), (1, 1, 1, 0), (1, 1, 1, 1)),
        ("1", failed, (1, 0, 0, 1), (1, 0, 0, 2)),
        ("1", without_memory, (2, 1, 1, 1), (2, 1, 1, 2)),
        ("2", lambda: calls(2, 2), (1, 1, 1, 0), (1, 1, 2, 0)),
        ("2", lambda: calls(2, 2, 3, 3, 2), (2, 2, 3, 0), (2, 2, 4, 0)),
        ("2", back, (2, 2, 2, 0), (2, 2, 3, 0)),
        ("3", pending, (1, 2, 2, 0), (1, 3, 3, 0)),
        ("3b", lambda: pending(2, max_pending_calls=2), (1, 3, 3, 0), (1, 3, 3, 1)),
        ("4", shown, (1, 1, 2, 0), (1, 1, 3, 0)),
        ("5", lambda: calls(2), (1, 0, 0, 0), (1, 1, 1, 0)),
        ("5", lambda: calls(2, weights=3), (3, 0, 0, 0), (3, 1, 1, 0)),
        ("5", lambda: other_module(seen=True), (2, 1, 1, 0), (2, 2, 2, 0)),
        ("5", stayed, (2, 1, 1, 0), (2, 2, 2, 0)),
        ("5", lambda: moved(2), (2, 1, 1, 0), (2, 2, 2, 0)),
        ("2", lambda: moved(3), (2, 2, 2, 0), (2, 2, 3, 0)),
        ("6", scaled, (0, 0, 0, 0), (1, 0, 0, 0)),
        ("6", other_module, (1, 1, 1, 0), (2, 1, 1, 0)),
        ("6", moved, (1, 1, 1, 0), (2, 1, 1, 0)),
        ("6", lambda: moved(max_copied_mib=0), (1, 1, 1, 0), (2, 1, 1, 0)),
        ("6, no room", without_room, (1, 1, 1, 0), (1, 1, 1, 1)),
    ],
)
def test_what_a_call_does(row, situation, before, after):
    made = situation()
    run, args, kept = made if isinstance(made, tuple) else (made, [X, X.clone(), 2], None)
    assert counts(run) == before
    rescues, wanted = run.stats.rescues, run.fn(args.copy())[0].tolist()
    outputs, recording = run.run(args)
    assert [each.tolist() for each in outputs] == [wanted]
    assert (counts(run), run.stats.rescues - rescues) == (after, row == "4")
    assert (recording is None) is (row[0] in "16" or row == "3b")
    assert row != "3" or causes(run)[-1] == "held"
    del kept


@pytest.mark.parametrize("held", [False, True])
def test_recordings_of_what_is_gone_are_freed_once_something_else_is_recorded(held):
    run, kept = scaled(), []
    for size in (2, 20):
        w = torch.ones(size)[:2]
        call(run, X, w, 2)
        (result,), _ = run.run([X, w, 2])
        assert sum(each.is_gone for each in run.table.seen()) == len(kept)
        kept += [result] * held
        del w, result
        assert len(run.table.all()) == (len(kept) or 1)
        assert run.table.all() == run.owner._pools[0].recordings


def test_what_is_written_beside_operators_is_found_by_its_bits():
    def fn(x):
        x.numpy()[0] += 1
        return [x * 2]

    run = runner(fn, COPIED, check_layout=True)
    assert call(run, X.clone()) == [[4, 2]]
    assert run.layout.mutated == {0}


def test_a_recording_that_went_while_another_one_was_moved_is_left_alone():
    owner = Owner(SimulatedDriver())
    forward = runner(lambda x: [x * 2], COPIED, owner=owner)
    backward = runner(lambda x, n: [x * n], COPIED, SYMINT, owner=owner, is_backward=True)
    for _ in range(2):
        call(forward, X)
    held = [backward.run([X, n])[0][0] for n in (3, 3, 4, 4)]
    assert call(forward, X) == [[2, 2]]
    assert backward.table.all() == []
    assert backward.stats.rescued_bytes == 8, "the other was left to its holder"
    assert [t.tolist() for t in held] == [[3, 3], [3, 3], [4, 4], [4, 4]]


def test_a_written_input_that_is_moved_to_make_room_is_written_where_it_lies_then():
    owner = Owner(SimulatedDriver())
    make = runner(lambda x: [x * 3, x * 2], COPIED, owner=owner)
    write = runner(lambda w: [w.add_(1) * 3], STATIC, owner=owner, mutated={0})
    for _ in range(2):
        call(make, X)
    first = make.run([X])[0][1]
    address = first.data_ptr()
    for n in (3, 4):
        assert call(write, first) == [[3 * n, 3 * n]]
    make.forget_recordings()  # its next result lies where the first one lay, and is younger than the recording there
    second = make.run([X])[0][1]
    assert (second.data_ptr() == address, first.data_ptr() == address) == (True, False)
    assert call(write, second) == [[9, 9]]
    assert (first.tolist(), second.tolist()) == ([4, 4], [3, 3])


def test_what_is_too_large_to_be_copied_is_named_once_and_no_warm_up_for_ever(caplog):
    w = X.clone()
    run = runner(lambda s, w: [s * w], POOLED, STATIC, max_copied_mib=0)
    for _ in range(5):
        call(run, X.clone(), w)
    assert warnings(caplog) == [
        (
            "forward captured_0: calls like this one run without a graph: 3 calls were never recorded, since each had x0 "
            "(float32[2], read at model.py:0 in forward: code) at a new address, and they are too large to be copied "
            "(max_copied_mib=0). Keep saved tensors in place (hooks and offloading move them), or raise max_copied_mib."
        )
    ]
    assert counts(run) == (2, 0, 0, 3)


@pytest.mark.parametrize("moves", [{10: 1, 20: 2}, {10: 1, 11: 2}, {10: 1, 11: 0, 20: 2}])
def test_what_moves_now_and_then_is_not_said_to_move_in_every_call(moves, caplog):
    run = runner(lambda x, w: [x * w], COPIED, STATIC, max_copied_mib=0)
    places = [X.clone() for _ in range(3)]
    w = places[0].clone()
    for n in range(28):
        w.data = places[moves.get(n, 0)] if n in moves or n == 0 else w.data
        run.run([X, w])
    assert not warnings(caplog)


def test_moves_before_a_release_do_not_count_after_it(caplog):
    run = runner(lambda x, w: [x * w], COPIED, STATIC, max_copied_mib=0)
    w, kept = X.clone(), []
    for number in range(4):
        if number == 2:
            run.owner.release()
        kept.append(w.data)
        run.run([X, w])
        w.data = X.clone()
    assert not warnings(caplog)


def test_what_is_recorded_stays_known_however_many_keys_came_since():
    run = runner(lambda x, n: [x * n], COPIED, SYMINT)
    for n in (*range(2100), 0, 1, 1, 0):
        call(run, X, n)
    assert counts(run) == (2101, 2, 3, 0)
    assert run.table.all() == run.owner._pools[0].recordings


def test_one_more_call_without_a_graph_leaves_known_how_far_operators_draw():
    """Recordings go by what an earlier call of the same key learnt."""
    run, value = runner(lambda p, x: [p * x], POOLED, COPIED), torch.ones(2)
    run.owner.note_plain_results([value], is_warm_up=True)
    call(run, value, torch.ones(2))
    (seen,) = run.table.seen()
    seen.draws[:] = [5]
    assert call(run, value, torch.ones(2)) == [[1, 1]]
    assert counts(run) == (2, 0, 0, 0)
    assert seen.draws == [5]


def test_what_reads_results_of_a_partition_at_a_limit_is_no_warm_up():
    run, value = runner(lambda p, x: [p * x], POOLED, COPIED), torch.ones(2)
    run.owner.note_plain_results([value])
    for _ in range(3):
        assert call(run, value, torch.ones(2)) == [[1, 1]]
    assert (run.stats.plain_calls, run.stats.warmups) == (3, 0)
    assert run.table.seen() == []


def test_what_shares_memory_with_what_is_written_says_that_and_not_a_size(caplog):
    run = runner(lambda v, w: [v * w.add_(1)], STATIC, STATIC, mutated=(1,))
    for _ in range(4):
        base = torch.ones(4)
        call(run, base[:2], base[2:])
    (record,) = caplog.records
    assert (
        "can't be copied, since the graph writes an input that shares memory" in record.getMessage()
    )
    assert "max_copied_mib" not in record.getMessage()


def test_smaller_sizes_give_way_to_larger_ones_after_a_release_as_before():
    run = runner(lambda x, n: [x * n], COPIED, SYMINT)
    for _ in range(2):
        for size in (8, 8, 80, 80):
            call(run, torch.ones(size), size)
        (recording,) = run.table.all()
        assert recording.copied_bytes == 80 * 4
        run.owner.release()


def test_pending_calls_are_counted_for_each_set_of_storages_at_one_place():
    """FSDP2 gathers layer after layer in one place, and all forwards come before their backwards."""
    memory = np.ones(2, np.float32)
    run = scaled(max_pending_calls=1)
    layers = [torch.from_numpy(memory) for _ in range(3)]
    for w in layers * 2:
        call(run, X, w, 2)
    run.uses = [(False, True)]
    run.forget_recordings()
    held = [run.run([X, w, 2])[0] for w in layers]
    assert run.stats.plain_calls == 0
    assert [r.pool_index for r in run.table.all()] == [0, 0, 0]
    assert [t.tolist() for (t,) in held] == [[2.0, 2.0]] * 3


def causes(run):
    return [note.cause for note in run.notes]


def test_the_first_recording_and_one_for_another_shape():
    run = runner(lambda x, n: [x * n], COPIED, SYMINT)
    for n in (2, 2, 3, 3):
        call(run, torch.ones(2), n)
    first, shape = run.notes
    assert (first.cause, first.detail) == ("first", "the first call after the warm-up")
    assert (shape.cause, shape.detail) == (
        "shape",
        "the first call with this value or layout of x1 (read at model.py:1 in forward: code)",
    )
    assert first.copied_bytes == 8
    assert first.record_ms > 0


def test_recordings_that_are_made_once_more_say_why():
    run = runner(lambda x: [x * 2], COPIED, is_backward=True)
    for _ in range(2):
        call(run, torch.ones(2))
    run.move_apart(run.table.all()[0])
    call(run, torch.ones(2))
    run.close()
    for _ in range(2):
        call(run, torch.ones(2))
    assert causes(run) == ["first", "anew", "anew"]
    assert run.notes[1].detail.startswith("memory was laid out anew")
    assert run.notes[2].detail.startswith("recordings were freed")


def test_modules_that_take_turns_with_sizes_have_not_moved():
    run = runner(lambda x, w, n: [x * w * n], COPIED, STATIC, SYMINT)
    modules = torch.ones(2), torch.ones(2)
    for n in (1, 1, 2, 2):
        for w in modules:
            call(run, torch.ones(2), w, n)
    assert causes(run) == ["first", "other tensors", "shape", "other tensors"]
