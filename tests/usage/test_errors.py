"""Errors that are not the capture's: the user's own, memory that runs out; functions that are dropped."""

import functools
import gc
import logging

import pytest
import torch
from torch import nn

import cgpass
from cgpass.runtime import owner as owners
from tests.operators import is_recording
from tests.usage.programs import MLP, Checkpointed, gradients, in_threads
from tests.usage.test_failures import warned

COMPILERS = ["eager", "inductor"]

DUE = []
"""Errors that `raises` raises while here."""
ONCE = []
"""Errors that `raises` raises once, if captured."""


class UsersError(Exception):
    pass


@torch.library.custom_op("failures::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    """Raises what is due."""
    if DUE:
        raise DUE[0]
    if ONCE and is_recording(x.device):
        raise ONCE.pop()
    return x * 2


raises.register_fake(torch.empty_like)
raises.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture(autouse=True)
def nothing_due():
    DUE.clear()
    ONCE.clear()
    yield
    DUE.clear()
    ONCE.clear()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = MLP()
        self.second = MLP()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        x = nn.functional.dropout(self.first(x), 0.5)
        self.seen.add_(x.detach().mean(0))
        return self.second(raises(x))


def fails_in_call(number, steps=8):
    """A program whose call `number` raises the user's error."""

    def program(session):
        module, call = session.compiled(Model)
        values = []
        for step, x in enumerate(session.batches(4, 8, count=steps)):
            if step == number:
                error = UsersError("mine")
                DUE.append(error)
                with pytest.raises(UsersError, match=r"^mine$") as raised:
                    call(x)
                assert raised.value is error
                DUE.clear()
            else:
                out = call(x)
                out.sum().backward()
                values += [out.detach().clone(), *gradients(module)]
            values += [module.seen.clone()]
            module.zero_grad()
        return values

    return program


EAGER = {"unsafe_ops": ("failures::raises",), "on_skip": "silent"}
WHERE = {
    "in the warm-up": (0, {}),
    "in the call that records": (1, {}),
    "between graphs, first call": (0, EAGER),
    "between graphs, in the call that records": (1, EAGER),
    "between graphs, fifth call": (4, EAGER),
}


@pytest.mark.parametrize("where", WHERE)
def test_the_users_error_comes_through_unchanged(setting, caplog, where):
    number, options = WHERE[where]
    with caplog.at_level(logging.WARNING, "cgpass"):
        counters = setting.compare(fails_in_call(number), **options)
    assert counters["replays"] > 0
    assert counters["plain_calls"] == 0
    assert warned(caplog) == []


def out_of_memory(times, *, reset_before=None):
    """A program whose second call finds no memory to record, so many times."""

    def program(session):
        _, call = session.compiled(Model)
        values = []
        for number, x in enumerate(session.batches(4, 8)):
            if number == 1 and session.options["driver"] != "none":
                text = "CUDA out of memory. Tried to allocate 1 GiB"
                ONCE.extend(torch.OutOfMemoryError(text) for _ in range(times))
            if number == reset_before:
                cgpass.reset()
            values.append(call(x).clone())
        return values

    return program


COUNTED = ("recordings", "plain_calls", "replays", "skips", "partitions_captured")
OUT_OF_MEMORY = {
    "once: freed and recorded": ({"times": 1}, (1, 0, 7, 0, 1)),
    "twice: plain": ({"times": 2}, (0, 7, 0, 0, 1)),
    "twice, and then reset": ({"times": 2, "reset_before": 3}, (1, 2, 4, 0, 1)),
}


@pytest.mark.parametrize("how", OUT_OF_MEMORY)
def test_memory_that_runs_out(setting, caplog, how):
    settings, expected = OUT_OF_MEMORY[how]
    with caplog.at_level(logging.WARNING, "cgpass"), torch.no_grad():
        counters = setting.compare(out_of_memory(**settings))
    assert tuple(counters[name] for name in COUNTED) == expected
    said = warned(caplog)
    assert len(said) == settings["times"] - 1
    for message in said:
        assert "OutOfMemoryError: CUDA out of memory" in message
        assert "unsafe_ops" not in message
        assert "after cgpass.reset() the next calls try again" in message


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in a thread's first call
@pytest.mark.parametrize(
    ("compiler", "outputs"), [*((each, "shared") for each in COMPILERS), ("eager", "owned")]
)
def test_calls_from_several_threads(setting, compiler, outputs):
    def program(session):
        _, call = session.compiled(MLP)
        batches = session.batches(4, 8, count=32)
        with torch.no_grad():
            call(batches[0])
            call(batches[0])
        results = [None] * len(batches)

        def work(first):
            # on a stream of its own where there are streams
            stream = torch.cuda.Stream() if session.device.type == "cuda" else None
            with torch.no_grad(), torch.cuda.stream(stream):
                for i in range(first, len(batches), 4):
                    results[i] = call(batches[i])
                if stream is not None:
                    stream.synchronize()

        if session.device.type == "cuda":
            torch.cuda.synchronize()
        in_threads(*(functools.partial(work, i) for i in range(4)))
        return results

    counters = setting.compare(program, compiler=compiler, outputs=outputs)
    assert counters["replays"] >= 32
    assert counters["plain_calls"] == 0
    assert counters["recordings"] == (1 if outputs == "owned" else 2)


def test_a_dropped_function_is_freed(setting):
    before = set(owners._owners)

    def program(session):
        _, call = session.compiled(MLP)
        for x in session.batches(4, 8, count=4):
            call(x).sum().backward()
        assert set(owners._owners) > before
        return []

    gc.collect()
    before = set(owners._owners)
    setting.run(program)
    torch.compiler.reset()
    gc.collect()
    assert set(owners._owners) <= before


def dropping():
    return nn.Sequential(MLP(), nn.Dropout(0.5))


@pytest.mark.parametrize("make", [dropping, lambda: Checkpointed(dropping)])
def test_compiled_autograd(setting, make):
    def program(session):
        module = session.module(make)

        def step(x):
            loss = module(x).square().mean()
            loss.backward()
            return loss.detach()

        call, values = session.compile(step), []
        with torch._dynamo.config.patch(compiled_autograd=True):
            for x in session.batches(4, 8, count=6):
                values += [call(x).clone(), *gradients(module)]
                module.zero_grad()
        return values

    counters = setting.compare(program, on_skip="silent")
    assert counters["replays"] > 0
