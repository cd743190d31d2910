"""Failed captures on a device: one trial finds the operator, memory that runs out, captures of the user, the end."""

import gc

import pytest
import torch
from torch import nn

import cgpass
from tests.usage.programs import MLP, Setting, in_threads
from tests.usage.test_boundaries import Around, close, inference, warned

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = Setting(torch.device("cuda", 0), "cuda")
COMPILERS = ["eager", "inductor"]


@torch.library.custom_op("gpu_failures::copies_from_the_host", mutates_args=())
def copies_from_the_host(x: torch.Tensor) -> torch.Tensor:
    """From pageable memory: waits for nothing, and still no capture allows it."""
    return x + torch.arange(x.shape[-1], dtype=x.dtype).to(x.device, non_blocking=True)


@torch.library.custom_op("gpu_failures::allocates_on_the_host", mutates_args=())
def allocates_on_the_host(x: torch.Tensor) -> torch.Tensor:
    scale = torch.full((1,), 2.0).pin_memory()
    return x * scale.to(x.device)


@torch.library.custom_op("gpu_failures::waits_for_everything", mutates_args=())
def waits_for_everything(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.cuda.synchronize()
    return y


@torch.library.custom_op("gpu_failures::draws_and_syncs", mutates_args=())
def draws_and_syncs(x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand_like(x)
    return y * (1 + (y.sum() > 0).item())


@torch.library.custom_op("gpu_failures::fills", mutates_args=())
def fills(x: torch.Tensor) -> torch.Tensor:
    """Takes more memory than there is, but only in a capture."""
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
    return x * 2


fills.register_fake(torch.empty_like)


OPS = [copies_from_the_host, allocates_on_the_host, waits_for_everything, draws_and_syncs]
for op in OPS:
    op.register_fake(torch.empty_like)


def assert_process_is_healthy():
    """Random ops, cusolver, allocation and another capture with random ops all work."""
    x = torch.rand(64, 64, device="cuda")
    torch.linalg.eigvalsh(x @ x.t())
    call = cgpass.CUDAGraphWrapper(lambda x: x @ x + torch.rand_like(x))
    values = [call(x).clone() for _ in range(3)]
    torch.cuda.synchronize()
    assert call.stats.replays == 2
    assert not torch.equal(values[1], values[2])


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op._name)
def test_what_no_capture_allows_runs_between_graphs(op, compiler):
    counters = close(CUDA, inference(op), compiler=compiler)
    assert counters["replays"] > 0
    if op is not allocates_on_the_host:  # the caching host allocator may have what it needs
        assert (counters["partitions_captured"], counters["partitions_eager"]) == (2, 1)
    assert_process_is_healthy()


def test_memory_that_runs_out_while_recording_comes_back(caplog):
    def program(session):
        _, call = session.compiled(lambda: Around(fills, 1024))
        x = session.randn(16384, 1024)
        with torch.no_grad():
            call(x)
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            values = [call(x).clone() for _ in range(3)]
            kept = sum(v.numel() * v.element_size() for v in values)
            gc.collect()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= before + kept + (1 << 27)
        return values

    counters = CUDA.compare(program)
    assert counters["recordings"] == 0
    assert any("OutOfMemoryError" in message for message in warned(caplog))
    assert_process_is_healthy()


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_users_capture_of_a_whole_step(compiler, recorded):
    """Forward, backward and an optimizer step of a compiled module inside `torch.cuda.graph`."""
    torch.manual_seed(3)
    module = nn.Sequential(*[MLP(32) for _ in range(2)]).cuda()
    call = torch.compile(module, backend=cgpass.cgpass, options={"compiler": compiler})
    x = torch.randn(16, 32, device="cuda")

    def step():
        for p in module.parameters():
            p.grad = None
        loss = call(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.1)
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4 if recorded else 1):
            step().detach()
    torch.cuda.current_stream().wait_stream(stream)
    state = [p.detach().clone() for p in module.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step().detach()
    for number in range(3):
        x.copy_(torch.randn(16, 32, device="cuda"))
        graph.replay()
        got = [loss.clone(), *(p.detach().clone() for p in module.parameters())]
        with torch.no_grad():
            for p, value in zip(module.parameters(), state, strict=True):
                p.copy_(value)
        plain = module(x).square().mean()
        gradients = torch.autograd.grad(plain, list(module.parameters()))
        want = [plain.detach(), *(v - 0.1 * g for v, g in zip(state, gradients, strict=True))]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, msg=f"replay {number}")
        with torch.no_grad():
            for p, value in zip(module.parameters(), got[1:], strict=True):
                p.copy_(value)
        state = got[1:]
    for _ in range(3):
        call(x).square().mean().backward()
    assert_process_is_healthy()


def test_a_function_dropped_during_anothers_capture():
    """By another thread, and by the captured function itself."""
    x = torch.randn(64, 64, device="cuda")

    def recorded():
        call = cgpass.CUDAGraphWrapper(lambda x: (x @ x).sin() + torch.rand_like(x))
        for _ in range(3):
            call(x)
        return call

    victims = [recorded() for _ in range(2)]

    def drops(x):
        y = x @ x
        if torch.cuda.is_current_stream_capturing():
            in_threads(victims.pop)
            victims.pop()
        return y + torch.rand_like(y)

    call = cgpass.CUDAGraphWrapper(drops)
    for _ in range(3):
        call(x)
    torch.cuda.synchronize()
    assert call.stats.replays == 2
    assert victims == []
    assert_process_is_healthy()
