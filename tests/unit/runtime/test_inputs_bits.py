"""Copies of every dtype, with the multi-tensor kernel as on CUDA: it knows few of them."""

import pytest
import torch

from cgpass.compile.layouts import _copied
from cgpass.runtime.inputs import (
    COPIED_AS_THEY_ARE,
    Placeholder,
    as_bits,
    copies_in,
    copy_in,
)

KNOWN = set(COPIED_AS_THEY_ARE)
OTHERS = [
    getattr(torch, name)
    for name in [
        "uint16",
        "uint32",
        "uint64",
        "complex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "int4",
        "bits8",
        "bits16",
    ]
]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
EVERY = pytest.mark.parametrize("dtype", OTHERS, ids=str)


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch):
    copy = torch._foreach_copy_

    def refusing(targets, sources):
        for tensor in (*targets, *sources):
            if tensor.dtype not in KNOWN:
                raise RuntimeError(f'"foreach_tensor_copy" not implemented for {tensor.dtype}')
        return copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", refusing)


def values(dtype, *size):
    shape = (*size[:-1], size[-1] * dtype.itemsize)
    return torch.randint(0, 100, shape, dtype=torch.uint8).view(dtype)


def layouts(dtype):
    whole = values(dtype, 4, 6)
    return [whole, whole.t(), whole[:, 1:5], whole[0].expand(3, 6), whole[:0]]


@EVERY
def test_inputs_of_every_dtype_are_copied_in_and_back(dtype):
    values_in = layouts(dtype)
    placeholders = {i: Placeholder(value) for i, value in enumerate(values_in)}
    copy_in(copies_in(placeholders), values_in)
    for i, placeholder in placeholders.items():
        assert placeholder.tensor.dtype == dtype
        assert placeholder.tensor.stride() == values_in[i].stride()
        assert torch.equal(as_bits(placeholder.tensor), as_bits(values_in[i]))
    whole = Placeholder(values_in[2], whole_storage=True)
    whole.copy_from(values_in[2])
    written = values(dtype, 4, 6)[:, 1:5]
    whole.copy_to(written)
    assert torch.equal(as_bits(written), as_bits(values_in[2]))


def test_a_conjugate_is_copied_as_its_values():
    source = torch.complex(torch.randn(4), torch.randn(4)).to(torch.complex32)
    copy = _copied(source.conj(), (1,))
    assert torch.equal(as_bits(copy), as_bits(source.conj().resolve_conj()))
