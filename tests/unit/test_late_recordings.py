"""Recordings of gathered layers that come late: what waits for all to be made anew, how often, and what is forgiven."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cgpass.runtime.rerecording import Rerecording
from cgpass.runtime.strays import Strays

from cgpass import _torch
from cgpass.runtime import gathered, orders, strays
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.storage_set import StorageSet
from tests.unit.runners import COPIED, POOLED, STATIC, call, counts, runner


@pytest.fixture
def owner():
    """With a recording whose output is held."""
    owner = Owner(SimulatedDriver())
    run = runner(lambda x, w: [x * w + 1], COPIED, STATIC, owner=owner)
    x, w = torch.ones(4), torch.ones(4)
    call(run, x, w)
    owner.held = run.run([x, w])[0]
    assert owner.recordings()
    return owner


def asked(owner, count, *, drops):
    """Whether each of so many late recordings waits, where the wait before it ran out, with all made anew or not."""
    found, partitions = [], [Rerecording("a", owner), Rerecording("b", owner)]
    for number in range(count):
        order = partitions[number % 2]
        found.append(order.begin_in_order())
        order._waits = 0
        owner.starts.wanted = False
        owner.num_drops += drops
    return found


def test_late_recordings_wait_for_all_to_be_made_anew(owner):
    order = Rerecording("a", owner)
    assert order.begin_in_order()
    assert order.waits
    assert owner.starts.wanted
    assert order.begin_in_order()  # still
    assert owner.orders.count == 1
    del owner.held
    assert owner.start_over_if_idle()
    assert not order.waits


def test_what_is_never_idle_waits_once(owner):
    assert asked(owner, 4, drops=0) == [True, False, False, False]


def test_all_are_made_anew_a_few_times_at_most(owner):
    found = asked(owner, 6, drops=1)
    assert found == [True] * orders.MOST_ORDERS + [False, False]


def test_what_others_ask_for_is_no_order(owner):
    for _ in range(orders.MOST_ORDERS):
        owner.ask_to_start_over()
        assert Rerecording("a", owner).begin_in_order()
        owner.num_drops += 1
    owner.ask_to_start_over()
    assert not Rerecording("a", owner).begin_in_order()


def test_no_partition_waits_for_one_order_for_good(owner):
    order, waits = Rerecording("a", owner), []
    for _ in range(10):
        owner.starts.wanted = True  # whoever wants that again and again
        waits.append(order.begin_in_order())
        order._waits = max(0, order._waits - 1)
    assert waits == [True] * 2 * len(owner.recordings()) + [False] * 8
    assert Rerecording("b", owner).begin_in_order()


def test_partitions_that_are_late_for_one_step_ask_once(owner):
    for number in range(6):
        assert Rerecording(str(number), owner).begin_in_order()
    assert owner.orders.count == 1


def test_what_was_asked_for_is_forgotten_by_a_reset(owner):
    asked(owner, 6, drops=1)
    run = runner(lambda x, w: [x * w + 2], COPIED, STATIC, owner=owner)
    run._rerecording.results_move = True
    run._strays._passing = 9
    owner.release()
    assert not run._rerecording.results_move
    assert not run._strays._passing
    x, w = torch.ones(4), torch.ones(4)
    call(run, x, w)
    call(run, x, w)
    assert Rerecording("a", owner).begin_in_order()


def test_a_step_of_many_calls_is_waited_for(owner, monkeypatch):
    monkeypatch.setattr(owner, "recordings", lambda: [None] * 300)
    order = Rerecording("a", owner)
    assert order.begin_in_order()
    assert not any(owner.start_over_if_idle() for _ in range(599))
    assert owner.starts.wanted


def test_nothing_waits_where_nothing_is_recorded():
    assert not Rerecording("a", Owner(SimulatedDriver())).begin_in_order()


def late(run, owner):
    """As if all were to be made anew."""
    run._rerecording._waits = 5
    owner.starts.wanted = True


def test_what_a_waiting_call_made_counts_as_a_warm_ups(owner):
    run = runner(lambda x, w: [x * w + 2], COPIED, STATIC, owner=owner)
    x, w = torch.ones(4), torch.ones(4)
    call(run, x, w)
    late(run, owner)
    (out,), recording = run.run([x, w])
    assert recording is None
    assert counts(run) == (1, 0, 0, 1)
    assert owner.is_of_warm_up(out)


def test_a_call_that_begins_to_wait_is_not_said_to_be_held_up(owner, monkeypatch):
    run = runner(lambda x, w: [x * w + 2], COPIED, STATIC, owner=owner)
    x, w = torch.ones(4), torch.ones(4)
    call(run, x, w)
    monkeypatch.setattr(run, "_slot", lambda *_: late(run, owner))
    call(run, x, w)
    assert counts(run) == (1, 0, 0, 1)
    assert not run.reasons._counts


# ---- inputs that what waits has made


def stray_calls(owner, count, tensor=None):
    """Whether inputs that lie in no pool are to be copied, call after call."""
    found, tensor = Strays(owner), torch.ones(4) if tensor is None else tensor
    said = []
    for number in range(count):
        assert found.find([tensor], [0], number) == [0]
        said.append(found.persist([tensor], [0]))
    return said


def test_strays_are_copied_after_some_calls_in_a_row():
    said = stray_calls(Owner(SimulatedDriver()), 10)
    assert said.index(True) == strays._CALLS_UNTIL_COPIED - 1


def test_strays_that_are_made_plainly_for_good_are_copied_soon():
    owner, made, warm = Owner(SimulatedDriver()), torch.ones(4), torch.ones(4)
    owner.note_warm_up([warm])
    strays.note_made_plainly(owner, [made, warm, None, 3])
    assert stray_calls(owner, 3, made) == [False, True, True]
    for tensor in (warm, torch.ones(4)):
        assert not any(stray_calls(owner, strays._CALLS_UNTIL_COPIED - 1, tensor))


def test_strays_do_not_count_while_all_wait_to_be_made_anew(monkeypatch):
    owner = Owner(SimulatedDriver())
    owner.starts.wanted = True
    assert not any(stray_calls(owner, 20))
    monkeypatch.setattr(strays, "_PASSING", 5)
    said = stray_calls(owner, 20)
    assert said.index(True) == 5 + strays._CALLS_UNTIL_COPIED - 1


def test_storages_of_what_has_memory_are_noted():
    owner, tensor = Owner(SimulatedDriver()), torch.ones(4)
    owner.note_warm_up([None, 3, tensor, torch.ones(4).to_sparse()])
    assert list(owner._warm_ups) == [tensor.untyped_storage()]
    owner.note_warm_up([tensor[1:], tensor])
    assert len(owner._warm_ups) == 1


def test_storages_that_died_are_not_told_of():
    found, kept = StorageSet(), [torch.ones(4).untyped_storage() for _ in range(3)]
    for storage in kept:
        found.add(storage)
    del kept[1], storage
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in kept]


def test_storages_that_died_are_looked_for_when_as_many_were_added(monkeypatch):
    found, looks = StorageSet(), []
    is_expired = _torch.WeakStorage.expired.fget
    monkeypatch.setattr(
        _torch.WeakStorage, "expired", property(lambda ref: looks.append(1) or is_expired(ref))
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
    made = getattr(_torch.WeakStorage, method)
    work = made.fget if isinstance(made, property) else made

    def collecting(*args):
        if late and not inside:
            inside.append(True)
            found.add(late.pop())
            inside.pop()
        return work(*args)

    replaced = property(collecting) if isinstance(made, property) else collecting
    monkeypatch.setattr(_torch.WeakStorage, method, replaced)
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


def test_strays_of_warm_ups_do_not_count():
    owner, tensor = Owner(SimulatedDriver()), torch.ones(4)
    owner.note_warm_up([tensor])
    assert not any(stray_calls(owner, 20, tensor))


def test_what_lies_where_a_warm_ups_output_lay_is_none():
    owner, memory = Owner(SimulatedDriver()), np.ones(4, np.float32)
    first = torch.from_numpy(memory)
    owner.note_warm_up([first])
    assert owner.is_of_warm_up(first[1:])
    del first
    for _ in range(50):  # none of which has the first one's storage, either
        assert not owner.is_of_warm_up(torch.from_numpy(memory))


def test_a_plain_forward_whose_results_lie_where_its_warm_ups_lay_has_them_copied():
    owner, memory = Owner(SimulatedDriver()), np.ones(4, np.float32)
    backward = runner(lambda y: [y * 2], POOLED, owner=owner)
    saved = torch.from_numpy(memory)
    owner.note_warm_up([saved])
    for _ in range(strays._CALLS_UNTIL_COPIED + 4):
        assert call(backward, saved) == [[2.0] * 4]
        saved = torch.from_numpy(memory)
    assert counts(backward)[1:3] == (1, 3)


# ---- the first round


def gather(weights):
    """As FSDP2 does."""
    for weight in weights:
        gathered._gathered.add(weight.untyped_storage())


def test_modules_warm_up_again_after_a_reset():
    run = runner(lambda x, w: [x * w + 1], COPIED, STATIC)
    x, place = torch.ones(4), np.ones(4, np.float32)
    weights = [torch.from_numpy(place) for _ in range(3)]  # in one place
    gather(weights)
    for expected in ((3, 0, 0, 0), (3, 1, 3, 0)):
        for w in weights:
            call(run, x, w)
        assert counts(run) == expected
    run.close()
    for w in weights:
        call(run, x, w)
    assert counts(run) == (6, 1, 3, 0)


def test_the_first_round_ends_with_a_backward(monkeypatch):
    owner = Owner(SimulatedDriver())
    run = runner(lambda x, w: [x * w + 1], COPIED, STATIC, owner=owner)
    x, weights = torch.ones(4), [torch.full((4,), float(n)) for n in range(4)]
    gather(weights)
    for w in weights[:2]:
        call(run, x, w)
    owner.enter_call(is_backward=True)
    asked = []
    note = run._gathered.note
    monkeypatch.setattr(
        run._gathered,
        "note",
        lambda args, *, is_late: asked.append(is_late) or note(args, is_late=is_late),
    )
    call(run, x, weights[2])
    assert asked == [True]
    assert not run._gathered._is_first_round


def test_the_pool_is_there_once_the_backend_is_named():
    program = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
assert not hasattr(_fsdp_param.alloc_storage, "_is_of_cgpass")
import cgpass.backend
assert _fsdp_param.alloc_storage._is_of_cgpass
"""
    subprocess.run([sys.executable, "-c", program], check=True)
