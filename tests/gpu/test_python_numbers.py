"""Numbers of Python and NumPy that change from call to call, compared bit for bit with `torch.compile` by itself.

On CUDA; with GPU_SUITE_DEVICE=cpu through the simulated driver.
"""

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
    """One for each call; where every other one is compiled or recorded again, few that come again."""
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
"""Kinds that change without a new recording."""
KINDS = (*ARGUMENTS, "int", "bool", "complex", "complex64")


def few(x, k):
    """The smallest of graphs."""
    return torch.sin(x * k) + k


def several(x, k):
    y = (torch.sin(x * k) + k).cos() * 2
    return y / k - (x == k) * x, (y + k) * x


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
@pytest.mark.parametrize("fn", [few, several])
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind, fn, compiler):
    if compiler == "inductor" and (kind == "complex64" or (kind, fn) == ("complex", several)):
        pytest.skip("torch.compile by itself raises: Inductor has no lowering for it")
    counters = compare(fn, kind, compiler)
    assert counters["replays"], counters
    if kind in ARGUMENTS and (fn, compiler) != (several, "eager"):  # which divides between graphs
        graphs = 2 if kind in ("float", "float64") else 1
        assert counters["recordings"] <= 2 * graphs, counters


@BOTH
@pytest.mark.parametrize("fn", [few, several])
@pytest.mark.parametrize("kind", ["float", "int", "bool", "float64", "float32", "int64"])
def test_training(kind, fn, compiler):
    counters = compare(fn, kind, compiler, train=True)
    assert counters["replays"], counters
