"""Steps over slots: what is dropped when, what is copied out, what a plan says."""

import contextlib
import weakref

import pytest
import torch

from cgpass.runtime.executor import Executor, Plan, Step
from tests.unit.runtime.runners import COPIED, counts, runner

X = torch.ones(2)


def test_values_are_dropped_at_their_last_use():
    alive = []

    def adds_one(args):
        made = args.pop() + 1
        assert all(each() is None for each in alive), "this was their last reader"
        alive.append(weakref.ref(made))
        return [made]

    steps = [Step(str(n), adds_one, (n,), (n + 1,), drops=(n,)) for n in range(3)]
    assert Executor(Plan(1, 4, tuple(steps), (3,)), None)([X])[0].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("visible", "second_reads", "read"),
    [((0, 1), False, set()), ((0, 1), True, {0}), ((1,), False, {0})],
)
def test_a_runner_is_told_who_gets_its_outputs(visible, second_reads, read):
    first = runner(lambda x: [x * 2, x * 3], COPIED)
    steps = [Step("captured_0", first, (0,), (1, 2), drops=(0,))]
    if second_reads:
        steps.append(Step("captured_1", lambda args: args, (1,), (3,)))
    Executor(Plan(1, 4, tuple(steps), (1, 2), visible=frozenset(visible)), first.owner)
    assert first.uses == [(n in visible, n in read) for n in (0, 1)]


def test_steps_are_told_in_order_and_only_inside():
    told, adds = (
        [],
        [Step(f"eager_{n}", lambda args: [args.pop() + 1], (n,), (n + 1,)) for n in (0, 1)],
    )
    executor = Executor(Plan(1, 3, tuple(adds), (2,)), None)

    def noting(name):
        return lambda step, run: lambda values: told.append(f"{name} {step.name}") or run(values)

    with contextlib.ExitStack() as outer:
        executor.wrap(noting("outer"), outer)
        with contextlib.ExitStack() as inner:
            executor.wrap(noting("inner"), inner)
            assert executor([X])[0].tolist() == [3, 3]
        executor([X])
    executor([X])
    both = [f"{name} eager_{n}" for n in (0, 1) for name in ("inner", "outer")]
    assert told == [*both, "outer eager_0", "outer eager_1"]


def test_calls_run_plainly_on_request_and_recordings_stay():
    run = runner(lambda x: [x * 2], COPIED)
    executor = Executor(Plan(1, 2, (Step("captured_0", run, (0,), (1,)),), (1,)), run.owner)
    for run.owner.plain in (False, False, True, False):
        assert executor([torch.ones(2)])[0].tolist() == [2, 2]
    assert counts(run) == (1, 1, 2, 1)
