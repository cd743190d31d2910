"""Inputs, outputs, written inputs and values between partitions of every dtype.

On CUDA; with GPU_SUITE_DEVICE=cpu through the simulated driver.
"""

import re

import pytest
import torch

import cgpass
from tests.gpu import harness
from tests.unit.runtime.test_inputs import KNOWN, OTHERS
from tests.usage.programs import assert_replays, counted

pytestmark = harness.MARKS
# integers of less than a byte and bits have no kernels to compute with
OF_BYTES = [each for each in OTHERS if not re.fullmatch(r"torch\.(u?int[1-7]|bits.*)", str(each))]
DTYPES = pytest.mark.parametrize("dtype", [*sorted(KNOWN, key=str), *OF_BYTES], ids=str)
LAYOUTS = pytest.mark.parametrize("layout", ["dense", "transposed", "expanded", "slice"])


def values(dtype, seed, size=(4, 8)):
    """Any bits of small numbers; a bool has 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 120
    shape = (*size[:-1], size[-1] * dtype.itemsize)
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator).view(dtype)


def laid_out(tensor, layout):
    tensor = tensor.to(harness.DEVICE)
    if layout == "transposed":
        return tensor.t()
    if layout == "expanded":
        return tensor[0].expand(3, 8)
    return tensor[:, 1:7] if layout == "slice" else tensor


def as_integers(tensor):
    """The elements' bits; copying kernels and those that compute know them, whatever the dtype."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor.resolve_conj()).view(torch.int64)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_conj().view(sizes[tensor.dtype.itemsize])


def flipped(tensor):
    """Another value of every element."""
    if tensor.dtype == torch.complex128:
        return tensor + 1
    return torch.bitwise_xor(as_integers(tensor), 1).view(tensor.dtype)


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(as_integers(found), as_integers(expected))


def passed_on(a, b):
    return flipped(a), b.clone(), a


def results(fn, dtype, layout, calls, **options):
    """Results and inputs after each call, and the counters."""
    made = torch.compile(fn, backend=cgpass.cgpass, dynamic=False, options=options)
    found = []
    with counted() as counters:
        for call in range(calls):
            a, b = (laid_out(values(dtype, 2 * call + k), layout) for k in (0, 1))
            found.append([*made(a, b), a, b])
    return found, counters


def compare(fn, dtype, layout="dense", calls=6, **options):
    torch._dynamo.reset()
    options = {"driver": harness.DRIVER, "min_partition_ops": 1, **options}
    found, counters = results(fn, dtype, layout, calls, **options)
    for call, outputs in enumerate(found):
        a, b = (laid_out(values(dtype, 2 * call + k), layout) for k in (0, 1))
        for ours, expected in zip(outputs, [*fn(a, b), a, b], strict=True):
            assert_same_bits(ours, expected)
    return counters


@LAYOUTS
@DTYPES
def test_inputs_and_outputs(dtype, layout):
    counters = compare(passed_on, dtype, layout, compiler="eager")
    assert_replays(counters)


@DTYPES
def test_written_inputs(dtype):
    def fn(a, b):
        a.copy_(flipped(b))
        return flipped(b), a.clone()

    counters = compare(fn, dtype, compiler="eager")
    assert_replays(counters)


@DTYPES
def test_values_between_partitions(dtype):
    def fn(a, b):
        c, d = flipped(a), b.clone()
        rows = torch.nonzero(as_integers(a) > 300).shape[0]  # an eager partition
        return flipped(c), d.clone(), as_integers(d) + rows

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = compare(fn, dtype, compiler="eager")
    assert_replays(counters)


@DTYPES
def test_callables_graphed_by_hand(dtype):
    graphed = cgpass.make_graphed_callables(
        passed_on,
        tuple(values(dtype, seed).to(harness.DEVICE) for seed in (0, 1)),
        options={"driver": harness.DRIVER},
    )
    for call in range(4):
        a, b = (values(dtype, 2 * call + k).to(harness.DEVICE) for k in (0, 1))
        for ours, expected in zip(graphed(a, b), passed_on(a, b), strict=True):
            assert_same_bits(ours, expected)


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
def test_inductor_s_kernels(name):
    dtype = getattr(torch, name)
    counters = compare(passed_on, dtype, compiler="inductor")
    assert_replays(counters)
