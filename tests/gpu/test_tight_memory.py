"""Programs on a device that is full but for a little: what finds no memory to be recorded runs without a graph.

The device counts as full where PyTorch's limit for this process says so: other tests use it meanwhile.
"""

import contextlib
import math

import pytest
import torch
from torch import nn

import cgpass
from tests.gpu.harness import DEVICE, MARKS
from tests.usage.programs import counted

pytestmark = [
    *MARKS,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device"),
]
MIB = 1 << 20


@contextlib.contextmanager
def spared(num_bytes):
    """Leave so much to this process, beside what it has reserved."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + num_bytes) / total, torch.cuda.current_device()
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _nothing_is_left():
    torch.compiler.reset()
    torch.cuda.empty_cache()
    yield
    torch.compiler.reset()
    torch.cuda.empty_cache()


def convolutions():
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1)
    )


def perceptron():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())])


MODELS = {
    "perceptron": (perceptron, (32768, 512)),
    "convolutions": (convolutions, (32, 16, 128, 128)),
}


def trained(make, shape, driver, around=contextlib.nullcontext):
    """Gradients and losses of six steps, all but the first of which run inside of `around()`."""
    torch.manual_seed(5)
    module = make().to(DEVICE)
    call = torch.compile(
        module, backend=cgpass.cgpass, options={"driver": driver, "compiler": "eager"}
    )
    batches = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))
    values = []

    def step(batch):
        loss = call(batch.to(DEVICE)).square().mean()
        loss.backward()
        values.extend([loss.detach().clone(), *[p.grad.clone() for p in module.parameters()]])
        module.zero_grad()

    step(batches[0])
    with around():
        for batch in batches[1:]:
            step(batch)
    return [value.cpu() for value in values]


@pytest.mark.parametrize("model", MODELS)
def test_what_fits_once_cached_blocks_were_freed_is_recorded(model):
    make, shape = MODELS[model]
    expected = trained(make, shape, "none")
    torch.compiler.reset()
    torch.cuda.empty_cache()
    # For the graphs' copy of the input and its gradient; the rest has to come from what the first step left in the cache.
    room = 2 * 4 * math.prod(shape) + 32 * MIB
    with counted() as counters:
        values = trained(make, shape, "auto", lambda: spared(room))
    assert counters["recordings"] >= 1
    assert counters["replays"] + counters["plain_calls"] + counters["warmups"] == 12
    assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("model", MODELS)
def test_what_does_not_fit_runs_without_a_graph_and_says_so(model, caplog):
    make, shape = MODELS[model]
    torch.manual_seed(5)
    module = make().to(DEVICE)

    def compiled(driver):
        options = {"compiler": "eager", "driver": driver}
        return torch.compile(module, backend=cgpass.cgpass, options=options)

    call, plain = compiled("auto"), compiled("none")
    # fills its block: no pool can use what is free of one
    batch = torch.randint(-2, 3, shape).float().to(DEVICE)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_((20 * p).round().clamp(-2, 2))  # exact in any kernel: cuDNN looks for memory
        expected = plain(batch).cpu()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plain(batch)
        needed = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        others = [batch.clone() for _ in range(4)]  # each elsewhere: a graph needs a copy
        # Less and less room, until it is enough for a call, and not for a graph beside its copy of the input.
        for spare in range(2 * batch.nbytes, -needed, -batch.nbytes // 8):
            cgpass.reset()
            caplog.clear()
            room = torch.empty(needed + spare, dtype=torch.uint8, device=DEVICE)
            torch.cuda.empty_cache()
            with spared(0), counted() as counters:
                del room
                for other in others:
                    assert call(other).cpu().equal(expected)
            if not counters["recordings"]:
                break
        assert counters["recordings"] == 0
        assert counters["plain_calls"] + counters["warmups"] == 4
        said = caplog.messages
        assert sum("one run without a graph: OutOfMemoryError" in text for text in said) == 1
        cgpass.reset()
        with counted() as counters:
            for _ in range(4):
                assert call(batch).cpu().equal(expected)
        assert counters["recordings"] == 1
        assert counters["plain_calls"] == 0


@pytest.mark.parametrize("filled", [90, 95, 99])
@pytest.mark.parametrize("model", MODELS)
def test_training_on_a_full_device(model, filled):
    """At 99 percent there is room for what a step needs without a graph, beside some for the sizes of segments."""
    make, (count, *shape) = MODELS[model]
    shape = (count // 8, *shape)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected = trained(make, shape, "none")
    needed = torch.cuda.max_memory_allocated() - before + 128 * MIB
    torch.compiler.reset()
    torch.cuda.empty_cache()
    ballast = torch.empty(filled * needed, dtype=torch.uint8, device=DEVICE)
    with spared((100 - filled) * needed):
        values = trained(make, shape, "auto")
    del ballast
    assert all(map(torch.equal, values, expected))
