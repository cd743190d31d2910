"""Parts of a signature, and names of inputs."""

import pytest
import torch

from cgpass.compile.facts.input_info import InputInfo
from cgpass.runtime.inputs import Layout, describe
from cgpass.runtime.wrapper import _kind
from tests.unit.runtime.runners import COPIED, OPAQUE, STATIC, SYMINT, infos

CPU = torch.device("cpu")
X = torch.zeros(2, 3)


def test_integers_and_identities_make_the_shape_key():
    found = Layout(infos(SYMINT, OPAQUE, COPIED), check_static=True, check_layout=False)
    a, b = [], []
    assert found.shape_key([3, a, X]) == found.shape_key([3, a, torch.ones(5)])
    assert found.shape_key([3, a, X]) != found.shape_key([4, a, X])
    assert found.shape_key([3, a, X]) != found.shape_key([3, b, X])


def test_describe_names_and_lines():
    some = [InputInfo("w", STATIC, "model.py:3 in forward: w"), InputInfo("b", STATIC)]
    assert describe(some, range(2)) == "w (read at model.py:3 in forward: w), b"
    many = [InputInfo(f"p{i}", STATIC) for i in range(8)]
    assert describe(many, range(8)) == "p0, p1, p2, p3, p4, and 3 more"


def test_kinds_inferred_from_values():
    args = [X, X, 3, True, "text", None, torch.float32, torch.Generator(), object()]
    found = [_kind("x", value, CPU, is_static=i == 1) for i, value in enumerate(args)]
    assert found == [COPIED, STATIC, *[SYMINT] * 5, OPAQUE, OPAQUE]


@pytest.mark.parametrize(
    ("known", "other"), [("is_resized", torch.zeros(3, 2)), ("whole_storage", torch.zeros(9)[3:])]
)
def test_what_no_integer_tells_belongs_to_it(known, other):
    info = InputInfo("x", COPIED, **{known: True})
    found = Layout((info,), check_static=True, check_layout=False)
    assert found.shape_key([X]) == found.shape_key([X + 1])
    assert found.shape_key([X]) != found.shape_key([other])
