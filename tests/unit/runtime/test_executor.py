"""Steps over slots: what is dropped when, what is copied out, what a plan says."""

import contextlib
import weakref

import pytest
import torch

from cgpass.runtime.executor import Executor, Plan, Step
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
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


class Noting:
    """Wraps steps, and notes them."""

    def __init__(self):
        self.steps = []

    def __call__(self, step, run):
        def noted(values):
            self.steps.append(step.name)
            return run(values)

        return noted


@pytest.fixture
def executor():
    run = runner(lambda x: [x * 2], COPIED, owner=Owner(SimulatedDriver()))
    steps = (
        Step("captured_0", run, (0,), (1,), (0,)),
        Step("eager_1", lambda args: [args.pop() + 1], (1,), (2,), (1,)),
    )
    return Executor(Plan(1, 3, steps, (2,), visible=frozenset({0})), run.owner)


def run_of(executor):
    return executor.plan.steps[0].run


def test_steps_are_told_in_order_and_only_inside(executor):
    outer, inner = Noting(), Noting()
    executor([torch.ones(2)])
    with contextlib.ExitStack() as until:
        executor.wrap(outer, until)
        executor.wrap(inner, until)
        assert executor([torch.ones(2)])[0].tolist() == [3, 3]
        with pytest.raises(TypeError):
            executor(["no tensor"])
    executor([torch.ones(2)])
    assert outer.steps == inner.steps == ["captured_0", "eager_1", "captured_0"]
    assert executor.tally.calls == 4


def test_calls_run_plainly_on_request_and_recordings_stay(executor):
    for _ in range(3):
        executor([torch.ones(2)])
    executor.owner.plain = True
    held = [executor([torch.full((2,), float(n))])[0] for n in range(3)]
    assert [value.tolist() for value in held] == [[1, 1], [3, 3], [5, 5]]
    assert counts(run_of(executor)) == (1, 1, 2, 3)
    executor.owner.plain = False
    executor([torch.ones(2)])
    assert counts(run_of(executor)) == (1, 1, 3, 3)
