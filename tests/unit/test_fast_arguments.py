"""What checks arguments of graphed callables."""

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
