"""Where a partition's recordings lie: the first pool, one behind another, or one laid out anew for what is larger."""

import pytest
import torch

from cgpass.runtime.owner import Owner
from cgpass.runtime.placement import Placement
from cgpass.runtime.rerecording import Rerecording
from cgpass.runtime.simulated import SimulatedDriver
from tests.unit.runners import COPIED, call, counts, runner

NOT_GATHERED = frozenset()


def place_in(owner):
    return Placement("forward captured_0", owner), Rerecording("forward captured_0", owner)


def test_the_first_slot_until_something_moves_behind_another():
    owner = Owner(SimulatedDriver(), max_pending_calls=2)
    placement, rerecording = place_in(owner)
    assert placement.slot([], NOT_GATHERED, rerecording) == 0
    assert placement.move_behind(0)
    assert placement.slot([], NOT_GATHERED, rerecording) == 1
    assert not placement.move_behind(1), "more pools than calls may be pending"
    placement.begin_again()
    assert placement.slot([], NOT_GATHERED, rerecording) == 0


@pytest.mark.parametrize(
    ("recorded", "new", "drops"), [([], 8, 0), ([8], 8, 0), ([8, 2], 4, 0), ([8], 9, 1)]
)
def test_what_is_larger_than_all_before_has_all_laid_out_anew(recorded, new, drops):
    owner = Owner(SimulatedDriver())
    placement, _ = place_in(owner)
    for num_bytes in recorded:
        placement.note(num_bytes)
    placement.make_space(new)
    assert owner.num_drops == drops


def test_sizes_that_are_forgotten_need_no_space():
    owner = Owner(SimulatedDriver())
    placement, _ = place_in(owner)
    placement.note(8)
    placement.forget_sizes()
    placement.make_space(9)
    assert owner.num_drops == 0


def test_a_larger_shape_drops_the_smaller_ones_once():
    run = runner(lambda x: [x * 2], COPIED, settings={"check_layout": True})
    for n in (2, 3, 2, 3, 2):
        assert [call(run, torch.ones(n)) for _ in range(2)] == [[[2.0] * n]] * 2
    assert run.owner.num_drops == 1
    # a warm-up each, then 2, 3, and 2 again: the rest are replays of calls that also record
    assert counts(run) == (2, 3, 8, 0)
