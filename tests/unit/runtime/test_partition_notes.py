"""Every recording says why it was made."""

import torch

from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runtime.runners import COPIED, POOLED, STATIC, SYMINT, call, runner


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


def test_values_of_other_partitions_that_lie_elsewhere():
    owner = Owner(SimulatedDriver())
    first = runner(lambda x, n: [x * n], COPIED, SYMINT, owner=owner)
    second = runner(lambda h: [h + 1], POOLED, owner=owner)

    def both(n):
        outputs, _ = first.run([torch.ones(2), n])
        return call(second, *outputs)

    for n in (2, 2, 3, 3, 3):
        both(n)
    assert causes(second) == ["first", "memory"]
    assert "values of other partitions moved, or were recorded again: x0" in second.notes[-1].detail


def test_results_that_are_held_with_their_backward_to_come():
    run = runner(lambda x: [x * 2, x + 1], COPIED)
    run.uses = [(True, False), (False, True)]
    call(run, torch.ones(2))
    call(run, torch.ones(2))
    held = [run.run([torch.ones(2)])[0], run.run([torch.ones(2)])[0]]
    assert causes(run) == ["first", "held"]
    assert len(held) == 2


def test_a_tensor_that_each_call_replaces_is_moved_and_copied():
    run = runner(lambda x, w, v: [x * w * v], COPIED, STATIC, STATIC)
    w, kept = torch.ones(2), [torch.ones(2) for _ in range(5)]
    for v in (kept[0], *kept):
        call(run, torch.ones(2), w, v)
    assert causes(run) == ["first", "moved"]
    assert run.notes[-1].detail.startswith("moved: x2 (float32[2]")


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
    assert run.notes[1].detail.startswith("the memory layout changed")
    assert run.notes[2].detail.startswith("recordings were freed")


def test_modules_that_take_turns_with_sizes_have_not_moved():
    run = runner(lambda x, w, n: [x * w * n], COPIED, STATIC, SYMINT)
    modules = torch.ones(2), torch.ones(2)
    for n in (1, 1, 2, 2):
        for w in modules:
            call(run, torch.ones(2), w, n)
    assert causes(run) == ["first", "other tensors", "shape", "other tensors"]
