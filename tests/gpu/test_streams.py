"""Calls on several streams: what a slow stream still reads is not written, by a replay, a rescue or the allocator."""

import gc

import pytest
import torch

import cgpass
from tests.gpu import harness
from tests.usage.programs import counted

pytestmark = harness.MARKS

SLOW = 100_000_000
"""Cycles, some 50 ms."""


@pytest.fixture
def call():
    def fn(x):
        return (x.sin() + 1).cos().exp()

    torch.compiler.reset()
    compiled = torch.compile(
        fn, backend=cgpass.cgpass, options={"min_partition_ops": 1, "compiler": "eager"}
    )
    for _ in range(3):
        compiled(values(0))
    torch.cuda.synchronize()
    yield compiled
    torch.compiler.reset()


def values(number):
    return torch.full((64, 1024), float(number), device="cuda")


def expected(number):
    return (values(number).sin() + 1).cos().exp()


def streams():
    torch.cuda.synchronize()
    return torch.cuda.Stream(), torch.cuda.Stream()


@pytest.mark.parametrize("between", [False, True])
def test_a_dropped_output_that_is_still_read(call, between):
    first, second = streams()
    third = torch.cuda.Stream()
    inputs = [values(i) for i in range(4)]
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        out = call(inputs[1])
    if between:  # the call before the one that overwrites came on yet another stream
        with torch.cuda.stream(third):
            call(inputs[3])
    with counted() as counters:
        with torch.cuda.stream(second):
            kept = call(inputs[3]) if between else None
        with torch.cuda.stream(first):
            torch.cuda._sleep(SLOW)
            copy = out.clone()
            del out
        del kept
        with torch.cuda.stream(second):
            call(inputs[2])
    torch.cuda.synchronize()
    assert torch.equal(copy, expected(1))
    assert counters["replays"] == counters["calls"]


def test_a_rescued_output_is_read_after_the_copy(call):
    first, second = streams()
    inputs = [values(i) for i in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        out = call(inputs[1])
    with counted() as counters, torch.cuda.stream(second):
        torch.cuda._sleep(SLOW)
        call(inputs[2])
    with torch.cuda.stream(first):
        copy = out.clone()
    torch.cuda.synchronize()
    assert torch.equal(copy, expected(1))
    assert counters["rescues"] == 1


def test_what_a_dropped_model_returned_is_copied_behind_its_call():
    first, second = streams()
    module, x = torch.nn.Linear(64, 1024).cuda(), values(1)[:, :64].clone()
    compiled = torch.compile(module, backend=cgpass.cgpass, options={"compiler": "eager"})
    expected = module(x).detach()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        for _ in range(3):
            compiled(x).sum().backward()
        torch.cuda._sleep(SLOW)
        out = compiled(x).detach()
    at = out.data_ptr()
    with torch.cuda.stream(second):
        del module, compiled
        gc.collect()
    with torch.cuda.stream(first):
        copy = out.clone()
    torch.cuda.synchronize()
    assert out.data_ptr() != at
    torch.testing.assert_close(copy, expected)


def test_the_memory_of_a_rescued_output_is_not_given_away_while_it_is_read(call):
    first, second = streams()
    inputs = [values(i) for i in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        out = call(inputs[1])
    with torch.cuda.stream(second):
        call(inputs[2])
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLOW)
        copy = out.clone()
        del out
    with torch.cuda.stream(second):
        others = [torch.full((64, 1024), 9.0, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert torch.equal(copy, expected(1))
    assert all((other == 9).all() for other in others)
