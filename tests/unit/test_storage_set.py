"""Storages known as the objects that they are, for as long as they live."""

import torch

from cgpass.runtime.owner import Owner, StorageSet
from cgpass.runtime.simulated import SimulatedDriver


def test_storages_of_what_has_memory_are_noted():
    owner, tensor = Owner(SimulatedDriver()), torch.ones(4)
    for _ in range(2):
        owner.note_plain_results([None, 3, tensor, tensor[1:], torch.ones(4).to_sparse()])
        assert list(owner._plain_results) == [tensor.untyped_storage()]


def test_storages_that_died_are_not_told_of():
    found, kept = StorageSet(), [torch.ones(4).untyped_storage() for _ in range(63)]
    for storage in kept:
        found.add(storage)
    del kept[1], storage
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in kept]
    for _ in range(640):
        found.add(torch.ones(4).untyped_storage())
    assert len(found._refs) < 4 * 63
    assert all(storage in found for storage in kept)
