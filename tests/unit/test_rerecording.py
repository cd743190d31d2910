"""A partition whose inputs have moved: how long it waits for all to be recorded anew, and what it knows meanwhile."""

from types import SimpleNamespace

import pytest

from cgpass.inputs import InputInfo
from cgpass.runtime.owner import Owner
from cgpass.runtime.rerecording import Rerecording
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.starts import PATIENCE
from cgpass.runtime.stationary import Watch
from tests.unit.runners import COPIED
from tests.unit.test_stationary import tensors


class Table:
    """One recording, whose stationary inputs have moved."""

    def __init__(self, *moved):
        self.moved, (a, *self.args) = list(moved), tensors(3)
        self.seen = Watch(moved)
        self.seen.note([a] * 2)
        self.seen.settled, self.seen.handed_on = True, set(moved)

    def find(self, *keys):
        return [SimpleNamespace(moved=lambda args: self.moved)]

    def watch(self, *keys):
        return self.seen


def may_be_recorded(order, table):
    layout = SimpleNamespace(infos=[InputInfo("x", COPIED), InputInfo("y", COPIED)])
    return order.is_over(table, layout, ((), ()), table.args)


@pytest.fixture
def waiting():
    """A partition's `Rerecording` on an owner whose outputs are held at all times, and the owner."""
    owner = Owner(SimulatedDriver())
    owner.start_over = lambda: False
    held = SimpleNamespace(youngest=lambda: 0)
    owner._slots = [SimpleNamespace(live=held, recordings=[])]
    return Rerecording("a", owner), owner


def test_a_wait_in_vain_is_not_begun_again_but_what_moves_is_known(waiting):
    order, owner = waiting
    assert [may_be_recorded(order, Table(0)) for _ in range(2 * PATIENCE + 2)].count(True) >= 1
    order.results_move, owner.starts.wanted, before = False, False, owner.num_moves
    table = Table(0, 1)
    assert may_be_recorded(order, table)
    assert order.results_move
    assert table.seen.positions == ()
    assert owner.starts.wanted, "once nothing is held"
    assert may_be_recorded(order, table)
    owner.num_drops += 1
    assert not may_be_recorded(order, Table(1))
    assert owner.num_moves == before + 2


def test_moves_that_are_known_are_waited_for_once(waiting):
    order, owner = waiting
    table = Table(0)
    table.seen = Watch(())
    assert not may_be_recorded(order, table)
    assert (owner.starts.wanted, owner.num_moves) == (True, 0)
