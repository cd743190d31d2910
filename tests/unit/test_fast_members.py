"""Keys of tensors' layouts, and comparisons of members."""

from array import array
from collections import OrderedDict

import pytest
import torch

from cgpass.graphed.statics import _read_layouts
from cgpass.runtime import fast


def tensors():
    base = torch.arange(24.0).view(4, 6)
    kinds = [base, base.t(), base[1:], base[:, ::2], base[0, :1].expand(5), torch.tensor(2.5)]
    kinds += [torch.zeros(3, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool)]
    return [*kinds, torch.nn.Parameter(base), torch.empty(0), torch.empty(0, 3)]


def test_layouts_tell_what_a_graph_has_in_it():
    args = [*tensors(), torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2).to(bool)]
    args += [args[3], args[7].detach()]
    key = fast.layouts(args)
    found = _read_layouts(key)
    assert len(found) == len(args)
    for numbers, tensor in zip(found, args, strict=True):
        assert numbers[1:3] == (
            tensor.data_ptr(),
            next(i for i, t in enumerate(args) if t is tensor),
        )
        assert numbers[5:] == (*tensor.size(), *tensor.stride())
    assert fast.layouts([]) == b""
    with pytest.raises((TypeError, AttributeError)):
        fast.layouts([None])
    assert fast.requiring_grad(args) == bytes([t.requires_grad for t in args])


def test_layouts_differ_where_anything_does():
    base = torch.zeros(4, 4)
    other = torch.nn.Parameter(base)
    lists = [[base, base], [base, other], [base, base.t()], [base, base[:2]]]
    lists += [[base, base.view(torch.int32)], [base, base.view(16)], [base], [base, base[1:]]]
    assert len({fast.layouts(each) for each in lists}) == len(lists)


def test_members_are_compared_by_identity():
    values = [torch.zeros(2), None, "text"]
    holders = [dict(zip("abc", values, strict=True)), {"d": True}]
    mappings, keys = [holders[0]] * 3 + [holders[1]], list("abcd")
    given = (mappings, keys, [*values, True], holders, array("q", [3, 1]).tobytes())
    unchanged = fast.unchanged
    assert unchanged(*given) is True
    for change in ({"a": torch.zeros(2)}, {"b": 0}, {"e": 1}):
        before = dict(holders[0])
        holders[0].update(change)
        assert unchanged(*given) is False
        holders[0].clear()
        holders[0].update(before)
        assert unchanged(*given) is True
    del holders[0]["c"]
    holders[0]["other"] = values[2]
    assert unchanged(*given) is False
    with pytest.raises(ValueError, match="as many"):
        unchanged(mappings, keys[1:], values, [], b"")
    with pytest.raises(ValueError, match="as many"):
        unchanged(*given[:4], b"")


def test_members_are_looked_up():
    class Scripted:
        def __getitem__(self, key):
            return {"c": 3}[key]

    members = fast.members
    first, second = {"a": [], "b": None}, OrderedDict(a=1)
    mappings = [first, first, second, Scripted()]
    found = members(mappings, ["b", "a", "a", "c"])
    assert found == [None, [], 1, 3]
    assert found[1] is first["a"]
    assert members([], ()) == []
    for each in mappings:
        with pytest.raises(KeyError, match="'d'"):
            members([first, each], ["a", "d"])
    with pytest.raises(ValueError, match="as many"):
        members(mappings, ["a"])
