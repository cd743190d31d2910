"""What checks and copies arguments of graphed callables."""

from array import array

import pytest
import torch

from cgpass.runtime import fast
from tests.unit.test_fast import tensors


def test_fits():
    given = tensors(3)
    flags = bytes(len(given))
    assert not fast.fits(given, given, flags)  # one is a parameter
    with torch.no_grad():
        assert fast.fits(given, given, flags)
    assert fast.fits(given, given, bytes([t.requires_grad for t in given]))
    x = torch.zeros(2, 3)
    assert not fast.fits([x], [x.T], b"\0")
    assert not fast.fits([x], [x.double()], b"\0")
    assert not fast.fits([x], [x.to("meta")], b"\0")
    assert not fast.fits([None], [x], b"\0")
    assert not fast.fits([x, x], [x], b"\0")
    assert not fast.fits([x.clone().requires_grad_()], [x], b"\0")
    with pytest.raises(ValueError, match="as many flags"):
        fast.fits([x], [x], b"")


def test_fill():
    x, y = torch.zeros(2, 3), torch.ones(2, 3, requires_grad=True)
    assert fast.fill([x, x], [y, x.view(2, 3)], b"") == 24
    assert x.tolist() == y.tolist()
    assert x._version == 1
    assert not x.requires_grad
    square = torch.arange(4.0).view(2, 2)
    before = square.T.tolist()
    assert fast.fill([square], [square.T.clone()], b"") == 16
    assert square.tolist() == before
    z = torch.zeros(2, dtype=torch.complex64)
    assert fast.fill([z], [torch.tensor([1j, 2]).conj()], b"") == 16
    assert z.tolist() == [-1j, 2]
    shared = array("q", [y.untyped_storage().data_ptr()]).tobytes()
    x.zero_()
    assert fast.fill([x, torch.zeros(3)], [y, torch.ones(3)], shared) == -1
    assert x.sum() == 0
    assert fast.fill([x], [x], shared) == 0
    with pytest.raises(ValueError, match="as many values"):
        fast.fill([x], [], b"")
    with pytest.raises(RuntimeError, match="size"):
        fast.fill([x], [torch.zeros(5)], b"")
