"""Layers whose parameters are gathered, as FSDP's: their recordings lie in the order of a step, whatever came late."""

import itertools
from random import Random

import pytest
import torch

from cgpass.runtime import fast, starting_over, unsettled
from cgpass.runtime.owner import Limits, Owner
from cgpass.runtime.runner import PartitionRunner
from cgpass.runtime.settings import RunnerSettings
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.starting_over import MAX_STARTS, PATIENCE, ROUNDS, StartingOver
from cgpass.telemetry import new_call_stats
from tests.unit.runners import COPIED, POOLED, STATIC, SYMINT, call, counts, infos, runner

X = torch.ones(2)
needs_swaps = pytest.mark.skipif("not fast.can_swap()", reason="storages can't be swapped")


class Layers:
    """Layers of one class that are trained: each one's parameter has memory only while it runs."""

    def __init__(self, num, size=2):
        self.num = num
        self.parameters = [torch.full((size,), 2.0 + i) for i in range(num)]
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)
        forward = runner(lambda x, w: [x * w + 1, x * w * 2], COPIED, STATIC)
        forward.visible, forward.read = frozenset({0}), frozenset({1})
        backward = PartitionRunner(
            lambda args: [args[0] * args[1] * args[2]],
            infos(POOLED, COPIED, STATIC),
            forward.owner,
            RunnerSettings(limits=Limits(), is_backward=True),
            name="backward captured_0",
        )
        self.runners = (forward, backward)
        self.owner = forward.owner

    def total(self, count):
        return sum(getattr(run.stats, count) for run in self.runners)

    def gather(self, i, place):
        parameter = self.parameters[i]
        parameter.untyped_storage().resize_(place.nbytes)
        fast.swap_storages([parameter], [place])
        return parameter.fill_(2.0 + i)

    def free(self, i, place):
        fast.swap_storages([self.parameters[i]], [place])
        self.parameters[i].untyped_storage().resize_(0)

    def forward(self, i, place, x):
        (out, saved), _ = self.runners[0].run([X * x, self.gather(i, place)])
        assert out.tolist() == [x * (2.0 + i) + 1] * 2
        self.free(i, place)
        return saved

    def backward(self, i, place, x, saved):
        (grad,), _ = self.runners[1].run([saved.pop(), X * 3, self.gather(i, place)])
        assert grad.tolist() == [x * (2.0 + i) * 2 * 3 * (2.0 + i)] * 2
        self.free(i, place)

    def step(self, places, num_forwards=1):
        """Forwards of some batches, then their backwards."""
        xs = range(1, 1 + num_forwards)
        saved = {(x, i): [self.forward(i, next(places), x)] for x in xs for i in range(self.num)}
        for x in reversed(xs):
            for i in reversed(range(self.num)):
                given = saved.pop((x, i))
                assert given[0].tolist() == [x * (2.0 + i) * 2] * 2
                self.backward(i, next(places), x, given)


def num_pools(layers):
    return len({recording.slot for run in layers.runners for recording in run.table.all()})


@needs_swaps
@pytest.mark.parametrize("seed", [1, 2])
def test_layers_whose_parameters_come_to_their_place_late_share_a_pool(caplog, seed):
    """In the first step most lay elsewhere: the others are recorded before them."""
    layers, random, place = Layers(24), Random(seed), torch.zeros(2)
    kept = [torch.zeros(2) for _ in range(48)]
    layers.step(place if random.random() < 0.3 else elsewhere for elsewhere in kept)
    for _ in range(9):
        layers.step(itertools.repeat(place))
    before = layers.total("plain_calls"), layers.total("recordings")
    for _ in range(4):
        layers.step(itertools.repeat(place))
    assert (layers.total("plain_calls"), layers.total("recordings")) == before, "it settled"
    assert before[0] < 48, "no more than the rest of a step waited"
    assert before[1] <= 2 * 48
    assert num_pools(layers) == 1
    assert "still held" not in caplog.text


@needs_swaps
def test_layers_that_take_turns_at_places_share_a_pool(caplog):
    """As where each layer gets the place of the one that was freed first: the other way round in every other step."""
    layers = Layers(20)
    places = [torch.zeros(2) for _ in range(20)]
    for step in range(40):
        if step == 24:
            before = layers.total("plain_calls"), layers.total("recordings")
        layers.step(iter([*places, *reversed(places)]))
        places.reverse()
    assert (layers.total("plain_calls"), layers.total("recordings")) == before
    assert num_pools(layers) == 1
    assert "still held" not in caplog.text


@needs_swaps
def test_programs_that_hold_results_of_many_calls_settle_in_pools_of_their_own():
    layers, place = Layers(5), torch.zeros(2)
    for _ in range(30):
        layers.step(itertools.repeat(place), num_forwards=4)
    before = layers.total("plain_calls"), layers.total("recordings")
    for _ in range(10):
        layers.step(itertools.repeat(place), num_forwards=4)
    assert (layers.total("plain_calls"), layers.total("recordings")) == before
    assert before[1] <= (1 + ROUNDS) * 40
    assert layers.owner.starting_over._rounds <= ROUNDS


# ---- when it is time


def asked(*, is_backward=False, trains=True):
    found = StartingOver()
    found.add(new_call_stats(), is_backward=trains)
    found.ask_for_order(is_backward=is_backward)
    return found


def test_what_is_laid_out_in_order_begins_with_a_step():
    found = asked()
    calls = [False, False, True, True]
    assert [found.is_time(held=False, is_backward=back) for back in calls] == [False] * 4
    assert found.is_time(held=True, is_backward=False), "what is held is moved"
    assert asked(is_backward=True).is_time(held=False, is_backward=False)
    assert asked(trains=False).is_time(held=False, is_backward=False), "no step ends"


@pytest.mark.parametrize("calls", [[False], [True], [True, False]])
def test_who_waits_for_a_step_does_not_do_so_for_ever(calls):
    """No step ends, or what is held can't be moved."""
    found = asked()
    for number, back in enumerate(itertools.cycle(calls)):
        if not found.waits:
            break
        found.is_time(held=True, is_backward=back)
        assert number <= starting_over._CALLS_OF_A_STEP + 2 * PATIENCE
    assert not found.wanted


def test_what_finds_no_room_asks_at_most_so_often_each_time_later():
    found, stats = StartingOver(), new_call_stats()
    found.add(stats, is_backward=True)
    asked_at = []
    for stats.calls in range(5000):
        if not found.waits and found.ask_once_more(4, is_backward=False):
            asked_at.append(stats.calls)
            assert found.ask_once_more(4, is_backward=False), "it waits"
            found.give_up()
    assert asked_at == [0, 4, 12, 28, 60, 124]
    assert len(asked_at) == ROUNDS
    found.forget()
    assert found.ask_once_more(4, is_backward=False)


def test_what_settles_starts_over_as_often_as_it_must():
    owner = Owner(SimulatedDriver())
    asks = owner.starting_over
    for _ in range(MAX_STARTS + 2):
        asks.ask_for_order(is_backward=False)
        assert owner.start_over_if_it_is_time()
    for _ in range(MAX_STARTS):
        asks.ask()
        assert owner.start_over_if_it_is_time()
    asks.ask()
    assert not asks.wanted
    asks.ask_for_order(is_backward=False)
    assert owner.start_over_if_it_is_time()


# ---- which parameters are copied


def gathered_in_turn(run, layers, places, steps, seed=1):
    """Calls of layers whose parameters lie at given places, most often each at its first one; checks what they return."""
    random = Random(seed)
    sets = [[torch.ones(len(each[0])) for each in places] for _ in range(layers)]
    for parameter in itertools.chain(*sets):
        parameter.untyped_storage().resize_(0)
    for step in range(steps):
        for i, parameters in enumerate(sets):
            here = [each[(i + step) % 2 if len(each) == 2 else 0] for each in places]
            for k, each in enumerate(places):
                if len(each) > 2:
                    here[k] = each[i] if random.random() < 0.9 else random.choice(each)
            for parameter, place in zip(parameters, here, strict=True):
                parameter.untyped_storage().resize_(place.nbytes)
                fast.swap_storages([parameter], [place])
                parameter.fill_(i + 1.0)
            yield step, i, parameters
            for parameter, place in zip(parameters, here, strict=True):
                fast.swap_storages([parameter], [place])
                parameter.untyped_storage().resize_(0)


@needs_swaps
@pytest.mark.parametrize("small", [unsettled.SMALL, 1 << 10], ids=["few bytes", "many bytes"])
def test_the_smallest_that_move_now_and_then_are_copied(monkeypatch, small):
    """Beside large ones that take turns between two places, and may be too many bytes to be copied."""
    monkeypatch.setattr(unsettled, "SMALL", small)
    monkeypatch.setattr(unsettled, "TINY", 64)
    run = runner(lambda x, b, *t: [x * b[:2] + sum(t)], COPIED, *[STATIC] * 9)
    places = [
        [torch.zeros(1000) for _ in range(2)],
        *([torch.zeros(2) for _ in range(40)] for _ in range(8)),
    ]
    for step, i, parameters in gathered_in_turn(run, 6, places, 60):
        assert call(run, X, *parameters) == [[9.0 * (i + 1)] * 2]
        if (step, i) == (40, 0):
            before = counts(run)
    assert counts(run)[:2] == before[:2], "nothing warms up any more"
    assert counts(run)[3] == 0
    assert run.layout.parameters == (1,)


def test_once_there_is_no_room_the_smallest_are_copied_if_not_all_may_be(monkeypatch):
    monkeypatch.setattr(unsettled, "SMALL", 1 << 10)
    monkeypatch.setattr(unsettled, "TINY", 64)
    run = runner(lambda x, b, t: [x * b[:2] + t], COPIED, STATIC, STATIC)
    found, args = run.table._unsettled, [X, torch.zeros(1000), torch.zeros(2)]
    assert found.note_full(b"", args) == [], "nothing moved"
    monkeypatch.setattr(found, "freed", lambda *_: [1, 2])
    assert found.note_full(b"", args) == [2]
    monkeypatch.setattr(found, "freed", lambda *_: [])
    assert found.note_full(b"", args) == [2], "where it lay last, and it has moved before"


@needs_swaps
@pytest.mark.parametrize("limit", ["max_recordings", "max_static_sets"])
def test_parameters_are_copied_for_want_of_sets_and_not_of_shapes(monkeypatch, limit):
    monkeypatch.setattr(unsettled, "TINY", 0)
    run = runner(lambda x, n, w: [x * n + w], COPIED, SYMINT, STATIC, **{limit: 2})
    places = [[torch.zeros(2) for _ in range(6)]]
    for step, i, parameters in gathered_in_turn(run, 1, places, 60):
        n = step % 4 if limit == "max_recordings" else 1
        assert call(run, X, n, *parameters) == [[n + i + 1.0] * 2]
    assert run.layout.parameters == ((2,) if limit == "max_recordings" else ())
