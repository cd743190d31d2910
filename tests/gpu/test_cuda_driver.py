"""The driver on a real device: failed and foreign captures, streams, registered generators."""

import functools
import os
import subprocess
import sys

import pytest
import torch

from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.runtime.driver import CUDADriver
from cgpass.runtime.owner import Owner
from cgpass.runtime.wrapper import CUDAGraphWrapper
from tests.gpu.test_failed_captures import assert_process_is_healthy
from tests.unit.runtime.runners import partition
from tests.usage.programs import in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def owner():
    owner = Owner(CUDADriver(torch.device("cuda", 0)))
    yield owner
    owner.close()


def runner_of(owner, fn, *kinds, **settings):
    infos = [InputInfo(f"x{i}", kind) for i, kind in enumerate(kinds)]
    return partition(fn, infos, owner, **settings)


def boxed(fn):
    def call(args):
        inputs = list(args)
        args.clear()
        return [fn(*inputs)]

    return call


LIBRARIES = {
    "cublas": lambda x: x @ x,
    "cublaslt": lambda x: torch.nn.functional.linear(x.half(), x.half(), x[0].half()),
    "cudnn": lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]),
    "cufft": lambda x: torch.fft.rfft(x).abs(),
    "cusolver": lambda x: torch.linalg.cholesky_ex(x @ x.T + torch.eye(8, device=x.device))[0],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_thread_records_what_another_one_warmed_up(owner, library):
    runner = runner_of(owner, boxed(LIBRARIES[library]), InputKind.COPIED)
    xs = [torch.randn(8, 8, device="cuda") for _ in range(4)]
    runner.run([xs[0]])
    found = []

    def work(x):
        found.append(runner.run([x])[0][0].clone())

    for x in xs[1:]:
        in_threads(functools.partial(work, x))
    assert (
        runner.stats.replays >= 2
    )  # where no handle could be made, the first thread ran without a graph
    for x, y in zip(xs[1:], found, strict=True):
        torch.testing.assert_close(y, LIBRARIES[library](x))


def test_a_failed_capture_leaves_the_process_healthy(owner, caplog):
    def syncs(x):
        y = torch.rand_like(x)
        return x + y.sum().item()

    runner = runner_of(owner, boxed(syncs), InputKind.COPIED)
    x = torch.zeros(4, device="cuda")
    for _ in range(3):
        runner.run([x])
    assert (runner.stats.warmups, runner.stats.replays, runner.stats.plain_calls) == (1, 0, 2)
    assert sum("can't be captured" in each for each in caplog.messages) == 1
    assert_process_is_healthy()


def test_a_failed_capture_leaves_other_recordings_with_the_users_generator(owner):
    x = torch.zeros(100, device="cuda")
    draws = runner_of(owner, boxed(lambda x: x + torch.rand_like(x)), InputKind.COPIED)
    for _ in range(3):
        draws.run([x])

    def syncs(x):
        y = torch.rand_like(x)
        return y + y.sum().item()

    fails = runner_of(owner, boxed(syncs), InputKind.COPIED, on_skip="silent")
    for _ in range(3):
        fails.run([x])
    assert fails.stats.plain_calls == 2
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        want = [torch.rand(100, device="cuda") for _ in range(2)]
        torch.manual_seed(seed)
        got = [draws.run([x])[0][0].clone() for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_inside_a_foreign_capture_calls_run_plainly(owner):
    runner = runner_of(owner, boxed(lambda x: x * 2 + 1), InputKind.STATIC)
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        runner.run([x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,), recording = runner.run([x])
    assert recording is None
    x.fill_(3)
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 7))


def test_random_numbers_are_those_of_eager_and_the_generator_ends_there(owner):
    def draws(x):
        return x + torch.rand_like(x) + torch.nn.functional.dropout(x + 1, 0.5)

    x = torch.zeros(1000, device="cuda")
    torch.manual_seed(3)
    want = [draws(x) for _ in range(5)]
    end = torch.rand(3, device="cuda")
    runner = runner_of(owner, boxed(draws), InputKind.COPIED)
    torch.manual_seed(3)
    got = [runner.run([x])[0][0].clone() for _ in range(5)]
    assert torch.equal(torch.rand(3, device="cuda"), end)
    assert runner.stats.replays == 4
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_generator_given_as_input_is_registered(owner):
    def draws(args):
        x, generator = args
        args.clear()
        return [x + torch.rand(x.shape, device="cuda", generator=generator)]

    runner = runner_of(owner, draws, InputKind.COPIED, InputKind.OPAQUE)
    x = torch.zeros(100, device="cuda")
    generator = torch.Generator("cuda").manual_seed(11)
    want = [torch.rand(100, device="cuda", generator=generator) for _ in range(4)]
    generator.manual_seed(11)
    got = [runner.run([x, generator])[0][0].clone() for _ in range(4)]
    assert runner.stats.replays == 3
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_calls_on_changing_streams_are_ordered():
    size = 1 << 22
    weight = torch.rand(size, device="cuda")
    wrapper = CUDAGraphWrapper(lambda x, w: ((x * w).sin() * 3).cos() + x, static_input_indices=[1])
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.rand(size, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            results.append(wrapper(x, weight))
    torch.cuda.synchronize()
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, ((x * weight).sin() * 3).cos() + x)
    assert wrapper.stats.replays == 11


@pytest.mark.parametrize("expandable", [True, False])
def test_the_allocator_says_whether_its_segments_are_expandable(expandable):
    code = (
        "import torch; from cgpass import torch_private; print(torch_private.uses_expandable_segments()); "
        "torch.zeros(1, device='cuda'); print(torch_private.uses_expandable_segments())"
    )
    setting = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | setting,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["None", str(expandable)], done.stderr
