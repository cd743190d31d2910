"""Storages known as the objects that they are, for as long as they live."""

import sys
import threading

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.storage_set import StorageSet


def test_storages_of_what_has_memory_are_noted():
    owner, tensor = Owner(SimulatedDriver()), torch.ones(4)
    owner.note_plain_results([None, 3, tensor, torch.ones(4).to_sparse()])
    assert list(owner._plain_results) == [tensor.untyped_storage()]
    owner.note_plain_results([tensor[1:], tensor])
    assert len(owner._plain_results) == 1


def test_storages_that_died_are_not_told_of():
    found, kept = StorageSet(), [torch.ones(4).untyped_storage() for _ in range(3)]
    for storage in kept:
        found.add(storage)
    del kept[1], storage
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in kept]


def test_storages_that_died_are_looked_for_when_as_many_were_added(monkeypatch):
    found, looks = StorageSet(), []
    is_expired = torch_private.WeakStorage.expired.fget
    monkeypatch.setattr(
        torch_private.WeakStorage,
        "expired",
        property(lambda ref: looks.append(1) or is_expired(ref)),
    )
    alive = [torch.ones(4).untyped_storage() for _ in range(63)]
    for storage in alive:
        found.add(storage)
    for _ in range(640):
        found.add(torch.ones(4).untyped_storage())
    assert len(looks) < 2 * (63 + 640)
    assert len(found) < 4 * 63
    assert all(storage in found for storage in alive)


@pytest.mark.parametrize("method", ["expired", "get", "__init__"])
def test_a_collection_inside_may_add_storages(method, monkeypatch):
    found, alive = StorageSet(), [torch.ones(4).untyped_storage() for _ in range(32)]
    for storage in alive[:16]:
        found.add(storage)
    late, inside = alive[16:24], []
    made = getattr(torch_private.WeakStorage, method)
    work = made.fget if isinstance(made, property) else made

    def collecting(*args):
        if late and not inside:
            inside.append(True)
            found.add(late.pop())
            inside.pop()
        return work(*args)

    replaced = property(collecting) if isinstance(made, property) else collecting
    monkeypatch.setattr(torch_private.WeakStorage, method, replaced)
    for storage in alive[24:]:
        found.add(storage)
        assert {each.data_ptr() for each in found} >= {each.data_ptr() for each in alive[:16]}
    added = [storage for storage in alive if all(storage is not each for each in late)]
    assert len(added) > 24
    assert all(storage in found for storage in added)


def test_storages_come_from_several_threads():
    found, alive = StorageSet(), []

    def add():
        for number in range(400):
            storage = torch.ones(4).untyped_storage()
            found.add(storage)
            if number % 8 == 0:
                alive.append(storage)

    threads = [threading.Thread(target=add) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(alive) == 200
    assert all(storage in found for storage in alive)
