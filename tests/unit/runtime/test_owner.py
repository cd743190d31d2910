"""Pools of recordings, blocks that return to them, and outputs laid elsewhere."""

import contextlib
import gc
import time
import weakref

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runtime.runners import COPIED, call, counts, runner

X = torch.ones(2)


def partition(fn=lambda x: [x * 2], *, owner=None, uses=None, **settings):
    run = runner(fn, COPIED, owner=owner, **settings)
    run.uses = uses
    return run


def recorded(run):
    """Have a partition recorded, with nothing held afterwards."""
    for _ in range(2):
        call(run, X)
    return run.table.all()[-1]


def both(factor=5, **settings):
    """Two partitions that were recorded one after the other, and their recordings."""
    owner = Owner(SimulatedDriver())
    first = partition(owner=owner)
    second = partition(lambda x: [x * factor], owner=owner, **settings)
    return first, second, recorded(first), recorded(second)


def test_only_what_a_replay_overwrites_is_moved():
    owner = Owner(SimulatedDriver())
    first = partition(lambda x: [x * 2, x * 3], owner=owner)
    second = partition(lambda x: [x * 5], owner=owner)
    recorded(first)
    call(second, X)
    (_, kept), _ = first.run([X])
    call(second, X)  # is recorded where the other one lay
    del kept
    held, _ = first.run([X])
    assert call(second, X) == [[5, 5]]
    assert [value.tolist() for value in held] == [[2, 2], [3, 3]]
    assert (first.stats.rescues, first.stats.rescued_bytes) == (1, 8)


@pytest.mark.parametrize("may_move", [True, False])
def test_what_was_released_and_is_held_is_moved_before_something_is_recorded_on_it(may_move):
    owner = Owner(SimulatedDriver())
    first = partition(owner=owner, **({} if may_move else {"uses": [(False, True)]}))
    second, third = (partition(lambda x, n=n: [x * n], owner=owner) for n in (3, 4))
    recorded(first)
    recorded(second)
    call(third, X)
    (held,), _ = first.run([X])
    assert call(third, X) == [[4, 4]]
    assert [r.pool_index for r in third.table.all()] == [0 if may_move else 1]
    assert call(second, X) == [[3, 3]]
    assert held.tolist() == [2, 2]
    assert first.stats.rescues == may_move


def test_a_rescue_is_all_or_nothing():
    owner = Owner(SimulatedDriver())
    first = partition(owner=owner)
    second = partition(lambda x: [x * 3], owner=owner, uses=[(False, True)])
    for _ in range(2):
        kept = [first.run([X])[0], second.run([X])[0]]
        if second.stats.recordings == 0:
            kept.clear()
    (recording,) = first.table.all()
    assert len(owner.overwritten_by(recording)) == 2
    assert not owner.rescue(recording)
    assert (first.stats.rescues, second.stats.rescues) == (0, 0)
    del kept[1]
    assert owner.rescue(recording)
    assert (first.stats.rescues, second.stats.rescues) == (1, 0)
    assert owner.is_safe(recording)
    assert kept[0][0].tolist() == [2, 2]


def held_gradients(*, is_backward):
    """A forward that finds gradients of the call before, which lie where it writes."""
    forward, backward, *_ = both(3, is_backward=is_backward)
    for value in range(8):
        (gradient,), _ = backward.run([X * value])
        for number in range(2):
            assert call(forward, X * number) == [[2.0 * number] * 2]
        assert gradient.tolist() == [3.0 * value] * 2
        del gradient
    return forward, backward


def test_gradients_that_had_to_be_moved_once_get_a_pool_of_their_own():
    forward, backward = held_gradients(is_backward=True)
    assert backward.stats.rescues == 1
    assert counts(backward) == (1, 2, 9, 0)
    assert [r.pool_index for r in backward.table.all()] == [1]
    assert [r.pool_index for r in forward.table.all()] == [0]
    backward.owner.release()  # which forgets it
    for _ in range(3):
        assert call(backward, X) == [[3, 3]]
    assert [r.pool_index for r in backward.table.all()] == [0]


@pytest.mark.parametrize("own", [True, False])
def test_gradients_that_another_partition_overwrites_have_time_to_be_dropped(own, monkeypatch):
    forward, backward, *_ = both(3, is_backward=True)
    held = [backward.run([X])[0]]
    monkeypatch.setattr(time, "sleep", lambda seconds: held.clear())
    call(backward if own else forward, X)
    assert (len(held), backward.stats.rescues) == ((1, 1) if own else (0, 0))
    assert [r.pool_index for r in backward.table.all()] == [0]


@pytest.mark.parametrize("held", [True, False])
def test_recordings_go_before_a_larger_one_unless_a_backward_reads_what_is_held(held):
    owner = Owner(SimulatedDriver())
    first = partition(owner=owner, uses=[(False, True)])
    second = partition(lambda x: [x * 3], owner=owner, check_layout=True)
    recording = recorded(first)
    recorded(second)
    kept = first.run([X])[0] if held else None
    for _ in range(2):
        assert call(second, torch.ones(4)) == [[3] * 4]
    assert first.table.all() == ([recording] if held else [])
    del kept


def test_a_recording_that_was_closed_is_not_kept():
    """Not even where a younger one's outputs are held, or where its own lie elsewhere and are."""
    first, second, *_ = both()
    (emptied,), _ = first.run([X])
    (held,), _ = second.run([X])
    emptied.untyped_storage().resize_(0)
    gone = weakref.ref(first.table.all()[0])
    first.forget_recordings()
    gc.collect()
    assert gone() is None
    assert held.tolist() == [5, 5]


def test_a_recording_whose_outputs_could_not_be_moved_is_never_replayed(monkeypatch):
    run = partition()
    recording = recorded(run)

    def broken(blocks):
        raise KeyboardInterrupt

    monkeypatch.setattr(recording.memory, "rescue", broken)
    with pytest.raises(KeyboardInterrupt):
        recording.rescue([0])
    assert not recording.may_replay([X])


@contextlib.contextmanager
def in_a_fake_kernel():
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        yield


@pytest.mark.parametrize(
    "tracing",
    [
        FakeTensorMode,
        in_a_fake_kernel,
        lambda: torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize),
        enable_python_dispatcher,
        torch.inference_mode,
    ],
    ids=["fake", "kernel", "functionalization", "python", "inference"],
)
def test_an_owner_that_is_collected_during_a_trace_frees_its_memory_for_real(tracing, monkeypatch):
    ignored = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    run = runner(lambda x: [x * 2], COPIED)
    for value in range(3):
        (held,), _ = run.run([X * value])
    with tracing():
        del run
        gc.collect()
    others = [torch.full((2,), -1.0) for _ in range(64)]
    assert held.tolist() == [4, 4]
    assert type(held) is torch.Tensor
    assert (len(others), ignored) == (64, [])
