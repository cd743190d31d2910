"""Numbers of Python and NumPy that change from call to call, compared bit for bit with `torch.compile` by itself.

On CUDA; with GPU_SUITE_DEVICE=cpu through the simulated driver.
"""

import logging

import numpy as np
import pytest
import torch

import cgpass
from tests.gpu import harness
from tests.usage.programs import counted

pytestmark = harness.MARKS
BOTH = pytest.mark.parametrize("compiler", ["inductor", "eager"])
CALLS = 12


def numbers(kind):
    """One for each call; where every other one is compiled or recorded anew, few that come again."""
    steps = [0.1 * (n + 1) for n in range(CALLS)]
    return {
        "float": [0.0, *steps[1:]],  # the first is a constant, Dynamo learns of the others
        "int": [n % 2 + 2 for n in range(CALLS)],
        "bool": [n % 2 == 0 for n in range(CALLS)],
        "complex": [complex(n % 2, 1) for n in range(CALLS)],
        "float64": list(map(np.float64, steps)),
        "float32": list(map(np.float32, steps)),
        "float16": list(map(np.float16, steps)),
        "int64": [np.int64(n + 2) for n in range(CALLS)],
        "int32": [np.int32(n + 2) for n in range(CALLS)],
        "bool_": [np.bool_(n % 2) for n in range(CALLS)],
        "complex64": [np.complex64(complex(step, 1)) for step in steps],
        "tensor": [torch.tensor(step, dtype=torch.float64) for step in steps],
    }[kind]


ARGUMENTS = ("float", "float64", "float32", "float16", "int64", "int32", "bool_", "tensor")
"""What changes without anything being recorded anew."""
KINDS = (*ARGUMENTS, "int", "bool", "complex", "complex64")


def few(x, k):
    """The smallest of graphs."""
    return torch.sin(x * k) + k


def several(x, k):
    y = (torch.sin(x * k) + k).cos() * 2
    return y / k - (x == k) * x, (y + k) * x


def arithmetic(x, k):
    scale = k * 2 + 1
    return (x * scale + k).sin(), (x - scale) / 3, x.exp() * scale


def parts(x, k):
    y = (x * k).sin() * x + k
    rows = torch.nonzero(y.real > 100).shape[0]
    return ((y + rows) * k).cos() + x


def plain_backend(compiler):
    return "inductor" if compiler == "inductor" else "aot_eager"


def run(fn, kind, backend, options, *, dtype, train):
    torch._dynamo.reset()
    torch.manual_seed(3)
    compiled = torch.compile(fn, backend=backend, options=options)
    found = []
    for number in numbers(kind):
        x = torch.randn(64, 33, dtype=torch.float64).to(dtype).to(harness.DEVICE)
        out = compiled(x.requires_grad_(train), number)
        outputs = out if isinstance(out, tuple) else (out,)
        if train:
            sum(output.abs().float().square().sum() for output in outputs).backward()
            found.append([*(output.detach() for output in outputs), x.grad])
        else:
            found.append(list(outputs))
    return found


def compare(fn, kind, compiler, *, dtype=torch.float32, train=False):
    """With Inductor bit for bit; aten's kernels round differently where Dynamo makes a number a constant."""
    expected = run(fn, kind, plain_backend(compiler), None, dtype=dtype, train=train)
    options = {"driver": harness.DRIVER, "compiler": compiler, "min_partition_ops": 1}
    with counted() as counters:
        found = run(fn, kind, cgpass.cgpass, options, dtype=dtype, train=train)
    none = run(fn, kind, cgpass.cgpass, {**options, "driver": "none"}, dtype=dtype, train=train)
    for call, (ours, plain, theirs) in enumerate(zip(found, none, expected, strict=True)):
        for number, (a, b, c) in enumerate(zip(ours, plain, theirs, strict=True)):
            assert a.dtype == c.dtype
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (call, number, (a - b).abs().max())
            if compiler == "inductor":
                assert torch.equal(a.nan_to_num(), c.nan_to_num()), (call, number)
            else:
                torch.testing.assert_close(a.nan_to_num(), c.nan_to_num())
    return counters


@BOTH
@pytest.mark.parametrize("fn", [few, several, arithmetic])
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind, fn, compiler):
    if compiler == "inductor" and (kind == "complex64" or (kind, fn) == ("complex", several)):
        pytest.skip("torch.compile by itself raises: Inductor has no lowering for it")
    counters = compare(fn, kind, compiler)
    assert counters["replays"], counters
    if kind in ARGUMENTS:
        graphs = 2 if kind in ("float", "float64") else 1
        assert counters["recordings"] <= 2 * graphs, counters


@BOTH
@pytest.mark.parametrize("fn", [few, several])
@pytest.mark.parametrize("kind", ["float", "int", "bool", "float64", "float32", "int64"])
def test_training(kind, fn, compiler):
    counters = compare(fn, kind, compiler, train=True)
    assert counters["replays"], counters


@BOTH
@pytest.mark.parametrize("kind", ["float", "float64", "int64", "complex"])
def test_between_eager_partitions(kind, compiler):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = compare(parts, kind, compiler)
    assert counters["replays"], counters


@BOTH
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", ["float", "float64", "float32"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str
)
def test_dtypes_of_the_other_operand(dtype, kind, train, compiler):
    train = train and dtype.is_floating_point
    counters = compare(several, kind, compiler, dtype=dtype, train=train)
    assert counters["replays"], counters


@BOTH
def test_a_graph_that_is_too_small_runs_as_compiled_by_torch(compiler):
    def fn(x, k):
        return x * k

    expected = run(fn, "float", plain_backend(compiler), None, dtype=torch.float32, train=False)
    options = {"driver": harness.DRIVER, "compiler": compiler, "min_partition_ops": 50}
    found = run(fn, "float", cgpass.cgpass, options, dtype=torch.float32, train=False)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(found, expected, strict=True))


@BOTH
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_nobody_is_told_of_a_number(train, compiler, caplog):
    options = {"driver": harness.DRIVER, "compiler": compiler, "on_skip": "raise"}
    with caplog.at_level(logging.WARNING, logger="cgpass"):
        run(several, "float", cgpass.cgpass, options, dtype=torch.float32, train=train)
    assert not [record for record in caplog.records if record.name.startswith("cgpass")]


def test_replays_with_other_numbers_are_verified():
    options = {"driver": harness.DRIVER}
    with cgpass.verify() as verified:
        run(several, "float", cgpass.cgpass, options, dtype=torch.float32, train=True)
    assert verified.checked


def test_a_buffer_on_the_cpu_is_read_anew_in_each_call():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(1.0))

        def forward(self, x):
            return (torch.sin(x * self.scale) + self.scale).cos()

    module = Scaled()
    options = {"driver": harness.DRIVER, "min_partition_ops": 1}
    compiled = torch.compile(module, backend=cgpass.cgpass, options=options)
    x = torch.randn(64, device=harness.DEVICE)
    with torch.no_grad(), counted() as counters:
        for call in range(8):
            module.scale.fill_(call)
            torch.testing.assert_close(compiled(x), module(x))
    assert counters["replays"], counters


def test_several_threads_pass_numbers_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    compiled = torch.compile(
        several, backend=cgpass.cgpass, options={"driver": harness.DRIVER, "compiler": "eager"}
    )
    x = torch.randn(64, device=harness.DEVICE)
    for number in (0.5, 0.25, 0.125):
        compiled(x, number)

    def call(number):
        return [output.clone() for output in compiled(x, number)]

    chosen = [0.1 * (n + 1) for n in range(16)]
    with ThreadPoolExecutor(2) as threads:
        for number, outputs in zip(chosen, threads.map(call, chosen), strict=True):
            for a, b in zip(outputs, several(x, number), strict=True):
                torch.testing.assert_close(a, b)
