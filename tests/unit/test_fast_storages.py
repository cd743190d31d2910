"""Who holds an input, and the exchange of memory under storages."""

import sys
from array import array

import pytest
import torch

from cgpass.runtime import fast


def references(tensor):
    return array("q", fast.watched((tensor.untyped_storage(),)))[2] - 1  # that tuple's


def test_nobody_holds_no_inputs():
    assert fast.exclusive([None, torch.zeros(2)], (), ()) is True


def test_an_input_is_exclusive_until_somebody_holds_it():
    exclusive = fast.exclusive
    args = [torch.zeros(4), None, torch.ones(4)]
    positions, counts = (0, 2), [references(args[0]), references(args[2])]
    assert exclusive(args, positions, counts) is True
    holders = {
        "the tensor": lambda t: t,
        "a view": lambda t: t[1:],
        "an alias": lambda t: t.detach(),
        "its storage": lambda t: t.untyped_storage(),
        "its storage in another tensor": lambda t: torch.empty(0).set_(t.untyped_storage()),
        "a graph": lambda t: (torch.ones(4, requires_grad=True) * t).grad_fn,
        "a list": lambda t: [t],
    }
    for name, hold in holders.items():
        holder = hold(args[2])
        assert exclusive(args, positions, counts) is False, name
        del holder
        assert exclusive(args, positions, counts) is True, name


def test_an_input_given_twice_is_not_exclusive():
    tensor = torch.zeros(4)
    args = [tensor, tensor]
    del tensor
    assert fast.exclusive(args, (0, 1), [references(args[0])] * 2) is False


def test_two_views_of_one_storage_are_exclusive_together():
    base = torch.zeros(4)
    args = [base.detach(), base[2:].detach()]
    del base
    users = references(args[0])
    assert fast.exclusive(args, (0, 1), [users] * 2) is True
    args.pop()
    assert fast.exclusive(args, (0,), [users]) is False, "fewer than when it was recorded"


def test_exclusive_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="as many counts as positions"):
        fast.exclusive([torch.zeros(1)], (0,), ())
    with pytest.raises(TypeError):
        fast.exclusive([None], (0,), (1,))
    with pytest.raises(IndexError):
        fast.exclusive([torch.zeros(1)], (1,), (1,))


def test_swapped_storages_keep_their_holders():
    first, second = [torch.zeros(4), torch.ones(2)], [torch.full((4,), 5.0), torch.full((2,), 6.0)]
    where = [t.data_ptr() for t in first + second]
    view, versions = first[0][1:], [t._version for t in first + second]
    fast.swap_storages(first, second)
    assert [t.data_ptr() for t in second + first] == where
    assert [t.tolist() for t in first] == [[5] * 4, [6] * 2]
    assert [t.tolist() for t in second] == [[0] * 4, [1] * 2]
    assert view.tolist() == [5] * 3
    assert [t._version for t in first + second] == versions
    first[0].fill_(7)
    assert view.tolist() == [7] * 3
    fast.swap_storages([], [])


def test_swapped_memory_is_freed_with_its_new_holder():
    memory = array("f", [1, 2, 3])
    owned, borrowed = torch.zeros(3), torch.frombuffer(memory, dtype=torch.float32)
    before = sys.getrefcount(memory)
    fast.swap_storages([owned], [borrowed])
    del borrowed
    memory[0] = 9
    assert owned.tolist() == [9, 2, 3]
    assert sys.getrefcount(memory) == before
    del owned
    assert sys.getrefcount(memory) == before - 1


def test_storages_of_other_sizes_are_not_swapped():
    with pytest.raises(RuntimeError, match="storages of one size on one device expected"):
        fast.swap_storages([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="storages of one size on one device expected"):
        fast.swap_storages([torch.zeros(2)], [torch.empty(2, device="meta")])
    with pytest.raises(ValueError, match="as many tensors as others"):
        fast.swap_storages([torch.zeros(2)], [])
