"""Kinds of a call's inputs: a test for each row of Note [One rule for inputs]."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.inputs import Inputs, Layout
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runtime.runners import COPIED, POOLED, STATIC, infos

X = torch.ones(2)


class Partition:
    """The inputs of a partition's calls, sorted and then remembered as the runner does."""

    def __init__(self, *kinds, mutated=(), whole=(), max_places=64, max_copied=64 << 20):
        described = tuple(
            dataclasses.replace(info, whole_storage=i in whole)
            for i, info in enumerate(infos(*kinds, mutated=mutated))
        )
        self.layout = Layout(described, check_static=True, check_layout=False)
        self.owner = Owner(SimulatedDriver())
        self.inputs = Inputs(self.layout, self.owner, max_places=max_places, max_copied=max_copied)

    def __call__(self, *args):
        key = self.layout.static_key(args)
        found = self.inputs.find(args, key)
        self.inputs.remember(args, found.new)
        return found


def places(*tensors):
    """Addresses; zero for numbers."""
    keys = (bytes(8) if isinstance(t, int) else fast.static_key([t], (0,)) for t in tensors)
    return b"".join(keys)


def number_known(partition):
    return sum(map(len, partition.inputs._known.values()))


# ---- static inputs


def test_what_lies_where_it_lay_is_read_in_place():
    part, (v, w) = Partition(COPIED, STATIC, STATIC), (Parameter(X.clone()) for _ in range(2))
    first = part(X, v, w)
    assert (first.code, first.new, first.copied) == ("new_module", (1, 2), ())
    for _ in range(2):
        found = part(X, v, w)
        assert (found.places, found.new, found.copied, found.code) == (places(v, w), (), (), None)


def test_what_replaced_a_tensor_that_is_gone_in_its_very_place_is_copied():
    part, memory = Partition(COPIED, STATIC), np.ones(2, np.float32)
    for expected in (None, (1,), (1,)):
        w = torch.from_numpy(memory)
        found = part(X, w)
        assert expected is None or (found.copied, found.code) == (expected, None)
        del w


def test_another_tensor_on_the_same_storage_has_moved():
    part, base = Partition(COPIED, STATIC), torch.ones(4)
    first, second = base[:2], base[2:]
    part(X, first)
    found = part(X, second)
    assert (found.code, found.copied) == (None, (1,))


def test_a_call_of_another_module_is_none_of_copies():
    """A buffer that both share does not make them one."""
    part, shared = Partition(STATIC, STATIC), X.clone()
    modules = [Parameter(X.clone()) for _ in range(3)]
    for w in modules:
        found = part(w, shared)
        assert (found.code, found.copied, found.places) == ("new_module", (), places(w, shared))
    for w in modules:
        found = part(w, shared)
        assert (found.code, found.new, found.places) == (None, (), places(w, shared))


def test_places_of_emptied_storages_are_not_new_for_others():
    """FSDP2 gathers one layer's parameters where it has just emptied those of another."""
    part, memory = Partition(COPIED, STATIC), np.ones(2, np.float32)
    first, other = (torch.from_numpy(memory) for _ in range(2))
    part(X, first)
    assert part(X, other).new == (1,), "both live"
    part, own = Partition(COPIED, STATIC), torch.ones(2)
    storage, address = own.untyped_storage(), own.data_ptr()
    part(X, own)
    storage.resize_(0)
    there = torch_private.storage_at(address, 8, torch.device("cpu"))  # never read
    assert part(X, torch_private.on_storage(there, X)).new == ()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_copied": 8}, None),
        ({"max_copied": 7}, "too_large"),
        ({"whole": (1,)}, "whole_storage"),
    ],
)
def test_what_is_too_large_or_read_beside_its_view_is_not_copied(settings, code):
    part, w = Partition(COPIED, STATIC, **settings), Parameter(X.clone())
    part(X, w)
    kept, w.data = w.data, X.clone()
    found = part(X, w)
    assert (found.code, found.copied) == (code, () if code else (1,))
    assert found.places == (places(w) if code else places(0))
    assert part(X, w).places == places(w), "it is in place from the next call on"
    del kept


@pytest.mark.parametrize(
    ("written", "other", "code"),
    [
        ((2,), "shares", "shares_memory"),
        ((), "shares", None),
        ((2,), "own", None),
        ((1,), "own", None),
    ],
)
def test_what_shares_memory_with_what_is_written_is_not_copied(written, other, code):
    part, (v, w) = Partition(COPIED, STATIC, STATIC, mutated=written), (X.clone(), X.clone())
    part(X, v, w)
    base = torch.ones(4)
    kept, v.data = v.data, base[:2]
    if other == "shares":
        w.data = base[2:]
    assert part(X, v, w).code == code
    del kept


# ---- values of other recordings


def test_what_lies_in_the_pool_is_read_in_place():
    part, saved = Partition(POOLED, STATIC), X.clone()
    part.owner._pool_addresses[saved.untyped_storage().data_ptr()] += 1
    found = part(saved, X)
    assert (found.values, found.absent) == (places(saved), ())


def test_what_was_made_without_a_graph_has_its_reader_run_without_one():
    part, saved, w = Partition(POOLED, STATIC), X.clone(), X.clone()
    part.owner.note_plain_results([saved, None, 3])
    assert part(saved, w).code == "new_module", "it is remembered as if nothing were amiss"
    found = part(saved[1:], w)
    assert (found.code, found.absent, found.copied) == ("not_in_the_pool", (0,), ())


def test_what_was_moved_by_a_hook_is_copied():
    part, saved, w = Partition(POOLED, STATIC), X.clone(), X.clone()
    part(saved, w)
    found = part(saved, w)
    assert (found.code, found.absent, found.copied, found.new) == (None, (0,), (0,), ())
    assert (found.places, found.values) == (places(w), places(0))


# ---- what is kept


def test_places_are_forgotten_with_their_storages():
    part = Partition(COPIED, STATIC, max_places=4)
    for size in range(2, 5000):
        part(X, torch.ones(size))
    assert number_known(part) <= 8
    alive = [torch.ones(2) for _ in range(100)]
    for w in alive * 2:
        found = part(X, w)
    assert found.new == (), "of what lives nothing is forgotten"
    assert number_known(part) >= 100
    part.inputs.forget()
    assert number_known(part) == 0


def test_of_one_storage_the_oldest_places_are_forgotten():
    part, base = Partition(COPIED, STATIC, max_places=4), torch.ones(1000)
    for n in range(500):
        part(X, base[n:])
    assert number_known(part) <= 8
    assert part(X, base[499:]).new == ()
    assert part(X, base[1:]).new == (1,)
