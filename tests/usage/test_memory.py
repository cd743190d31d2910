"""Memory is bounded: sizes share it, nothing grows, and all of it is returned."""

import contextlib
import gc
import sys

import pytest
import torch
from torch import nn

from cgpass.runtime import owner as owners
from tests.usage.programs import MLP, assert_steady, counted, runners, trained_on


def of_sizes(*sizes):
    return trained_on(MLP, [(size, 8) for size in sizes], dynamic=True)


@pytest.mark.parametrize(("sizes", "recordings"), [((10, 6, 4), 6), ((4, 6, 10), 10)])
def test_each_size_of_a_dynamic_shape_has_its_recording(setting, sizes, recordings):
    """Smaller ones once before a larger one came, and once afterwards, in its memory."""
    counters = setting.compare(of_sizes(*sizes * 4))
    assert_steady(counters, captured=2, recordings=recordings, warmups=6)


def test_sizes_beyond_max_recordings_run_plainly_and_known_ones_replay(setting, caplog):
    def program(session):
        _, call = session.compiled(MLP, dynamic=True)
        values = []
        with torch.no_grad():
            for size in [9, 8, 9, 8, *range(2, 8), 9, 8, 9, 8]:
                values.append(call(session.randn(size, 8)))
        return values

    counters = setting.compare(program, max_recordings=2)
    assert counters["recordings"] == 2, counters
    assert counters["plain_calls"] == 6, counters
    assert counters["replays"] == 6, counters
    assert counters["warmups"] == 2, counters
    assert sum("max_recordings=2" in each for each in caplog.messages) == 1


def kept_by(runner):
    """Lengths of what a runner and its owner keep."""
    table, inputs, owner = runner.table, runner._inputs, runner.owner
    return {
        "keys": len(table.seen()),
        "places": sum(map(len, inputs._known.values())),
        "recordings": sum(len(pool.recordings) for pool in owner._pools),
        "pools": len(owner._pools),
        "placeholders": len(owner.placeholders),
        "pool addresses": len(owner._pool_addresses),
    }


@contextlib.contextmanager
def python_calls():
    """Counts calls of Python functions."""
    made = [0]

    def count(frame, event, arg):
        made[0] += event == "call"

    sys.setprofile(count)
    try:
        yield made
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("training", "sizes"), [(False, 5000), (True, 600)])
def test_nothing_grows_with_thousands_of_sizes(way, training, sizes, caplog):
    """Only keys that were seen once do, up to as many as are kept."""
    found, plain_results, calls_made = [], [], []

    def program(session):
        module, call = session.compiled(lambda: MLP(2, 1))
        rows, others = session.randn(2 + sizes, 2), runners()
        for number in range(sizes):
            x = rows[: 2 + number]
            torch._dynamo.mark_dynamic(x, 0)
            looked_at = number in (100, sizes - 200, sizes - 1)
            count = python_calls() if looked_at else contextlib.nullcontext()
            with count as made, torch.set_grad_enabled(training):
                loss = call(x).sum()
            if training:
                loss.backward()
                module.zero_grad()
            if looked_at:
                ours = runners(others)
                found.append([kept_by(runner) for runner in ours])
                plain_results.extend(len(list(runner.owner.plain_results)) for runner in ours)
                calls_made.append(made[0])
        return [loss.detach()]

    with counted() as counters:
        way.run(program)
    assert counters["graphs"] <= 2, "a graph for all sizes"
    kept = [
        {key for each in kept for key in each.items() if "keys" not in key[0]} for kept in found
    ]
    assert kept[0] == kept[1] == kept[2]
    assert all(each["keys"] <= 64 + 2 * 2048 for each in found[-1])
    assert max(plain_results) <= 64, plain_results
    assert max(calls_made) < 1.5 * calls_made[0], calls_made
    assert len(caplog.messages) == 1 + training
    assert all(
        "never recorded, since each had a new value or layout of x.size(0)" in each
        for each in caplog.messages
    )


def recorded():
    gc.collect()
    return sum(len(owner._recordings()) for owner in owners._owners)


def test_a_reset_frees_a_function_without_parameters(setting):
    def program(session):
        call = session.compile(lambda x: x.sin().exp())
        for x in session.batches(4, 8, count=4):
            call(x)
        return []

    before = recorded()
    setting.run(program)
    assert recorded() > before, "another function of the same code may be called"
    torch.compiler.reset()
    assert recorded() == before


class Trainer:
    def __init__(self, session):
        self.module = session.module(MLP)

    def step(self, x):
        return self.module(x).sum()


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        layers = list(self.layers)
        x = layers[0](x)
        torch._dynamo.graph_break()
        x = layers[1](x.sin())
        torch._dynamo.graph_break()
        return x.sin().exp()


def in_a_list(session):
    modules = [session.module(MLP)]
    call = session.compile(lambda modules, x: modules[0](x).sum())
    return lambda x: call(modules, x)


def in_place(session):
    module = session.module(MLP)
    module.compile(backend=session.backend, options=session.options)
    return module


WAYS = {
    "module": lambda session: session.compiled(MLP)[1],
    "module in place": in_place,
    "halves": lambda session: session.compiled(Halves)[1],
    "list": in_a_list,
    "method": lambda session: session.compile(Trainer(session).step),
}


def train(call, session):
    for x in session.batches(4, 8, count=4):
        call(x).sum().backward()
    return call(session.randn(4, 8))


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_a_model_that_is_dropped_frees_its_graphs(setting, make):
    def program(session):
        before, call = recorded(), make(session)
        kept = train(call, session)
        value = kept.detach().clone()
        made = recorded() - before
        assert made in (2, 6)
        del call
        kept = kept.detach()
        assert recorded() == before
        for _ in range(3):  # of the same code
            call = make(session)
            train(call, session)
            del call
        assert recorded() >= before + made, "another model may follow"
        other = session.compile(lambda x: x.sin().exp())
        for x in session.batches(4, count=2):
            other(x)
        assert recorded() == before + 1
        assert torch.equal(kept, value), "what is held outlives its recording"
        return []

    setting.run(program)


def test_a_model_that_is_dropped_in_a_call_is_freed_before_another_records(setting):
    def program(session):
        before, call = recorded(), session.compile(session.module(lambda: MLP(8, 8)))
        train(call, session)
        (owner,) = [each for each in owners._owners if each._recordings()]
        with owner.lock:
            del call
            assert recorded() == before + 2
        train(session.compiled(lambda: nn.Linear(8, 8))[1], session)
        assert not owner._recordings()
        return []

    setting.run(program)


def test_modules_that_live_for_a_call_replay(setting):
    def program(session):
        weight = session.randn(8).abs()
        call = session.compile(lambda module, x: module(x.sin()).exp().cos())
        with counted() as counters:
            for x in session.batches(4, 8, count=12):
                module = nn.Linear(8, 1, bias=False)
                module.weight = nn.Parameter(weight[None], requires_grad=False)
                call(module, x)
                del module
        assert counters["replays"] >= 8, counters
        return []

    setting.run(program)


def test_a_living_model_keeps_its_graphs_when_its_parameters_are_replaced(setting):
    """Also after another one of its code was dropped: those that take turns between a few addresses would never replay."""

    def program(session):
        train(session.compiled(lambda: nn.Linear(8, 8, bias=False))[1], session)
        module, call = session.compiled(lambda: nn.Linear(8, 8, bias=False))
        before = recorded()
        train(call, session)
        assert recorded() == before + 2
        module.load_state_dict({"weight": module.weight.detach().clone()}, assign=True)
        torch.utils.swap_tensors(module.weight, nn.Parameter(module.weight.detach().clone()))
        assert recorded() == before + 2
        return []

    setting.run(program)
