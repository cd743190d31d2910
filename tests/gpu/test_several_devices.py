"""Several devices in one process: each compiled function records where its tensors are."""

import functools

import pytest
import torch
from torch.nn import functional as F

import cgpass
from tests.gpu import harness
from tests.usage.programs import (
    SEED,
    Block,
    assert_replays,
    counted,
    deterministic,
    differences,
    in_threads,
)

pytestmark = [*harness.MARKS, pytest.mark.multigpu(2)]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def made(device, driver, dropout=0.1):
    torch.manual_seed(SEED)
    module = Block(dropout=dropout).to(device)
    options = {"driver": driver, "compiler": "eager"}
    return module, torch.compile(module, backend=cgpass.cgpass, options=options)


def step(module, call, x):
    out = call(x)
    out.square().mean().backward()
    values = [out.detach().cpu(), *(p.grad.cpu() for p in module.parameters())]
    module.zero_grad(set_to_none=True)
    return values


def inputs(device, count=8):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(2, 6, 16, generator=generator).to(device) for _ in range(count)]


def compare(program):
    torch.compiler.reset()
    with deterministic(), counted() as counters:
        ours = [value for step in program("cuda") for value in step]
    torch.compiler.reset()
    with deterministic():
        plain = [value for step in program("none") for value in step]
    found = differences(ours, plain)
    assert not found, found[:5]
    assert_replays(counters)


def test_the_current_device_is_another_one():
    def program(driver):
        module, call = made(SECOND, driver)
        for number, x in enumerate(inputs(SECOND)):
            with torch.cuda.device(number % 2):
                yield step(module, call, x)
                assert torch.cuda.current_device() == number % 2

    compare(program)


def test_one_feeds_the_other():
    def program(driver):
        (first, call), (second, call2) = (made(device, driver) for device in (FIRST, SECOND))
        for x in inputs(FIRST):
            out = call2(call(x).to(SECOND))
            out.square().mean().backward()
            for module in (first, second):
                yield [p.grad.cpu() for p in module.parameters()]
                module.zero_grad(set_to_none=True)
            yield [out.detach().cpu()]

    compare(program)


def test_a_model_moves_to_the_other_device():
    def program(driver):
        module, call = made(FIRST, driver)
        for device, count in ((FIRST, 8), (SECOND, 8), (FIRST, 3)):
            module.to(device)
            for x in inputs(device, count):
                yield step(module, call, x)

    compare(program)


def test_a_thread_for_each_device():
    def program(driver):
        results = {}
        torch.manual_seed(SEED)
        models = {device: made(device, driver, dropout=0.0) for device in (FIRST, SECOND)}
        for device, (module, call) in models.items():  # Dynamo compiles in one thread at a time
            step(module, call, inputs(device, 1)[0])

        def work(device):
            torch.cuda.set_device(device)
            results[device] = [step(*models[device], x) for x in inputs(device, 12)]

        in_threads(*(functools.partial(work, device) for device in models))
        return [*results[FIRST], *results[SECOND]]

    compare(program)


def test_a_graph_on_two_devices_runs_with_a_reason(caplog):
    def fn(x, y):
        return (F.relu(x) + 1).sin().sum().to(y.device) + y.cos().sum()

    call = torch.compile(fn, backend=cgpass.cgpass, options={"compiler": "eager"})
    x, y = torch.randn(8, device=FIRST), torch.randn(8, device=SECOND)
    for _ in range(4):
        assert torch.equal(call(x, y), fn(x, y))
    assert "cuda:1" in caplog.text
