"""Order of birth: what a replay would overwrite while outputs are held."""

import pytest
import torch

from cgpass.runtime.outputs import OutputMemory
from cgpass.runtime.owner import LiveOutputs


class Made:
    """A recording, as far as its outputs matter."""

    def __init__(self, birth, count=1, released=None):
        self.birth = birth
        self.released = released or {}
        uses = [(True, False)] * count
        self.memory = OutputMemory([torch.zeros(4) for _ in uses], uses)
        self.memory.seal()

    def hand_out(self):
        return self.memory.aliases()


def test_the_youngest_held_recording_decides():
    live = LiveOutputs()
    assert live.youngest() == -1
    handed = {}
    for birth in (1, 2, 5):
        made = Made(birth)
        handed[birth] = made.hand_out()
        live.push(made)
    assert live.youngest() == 5
    del handed[2]
    assert live.youngest() == 5, "an older one let go: nothing changes"
    del handed[5]
    assert live.youngest() == 1
    del handed[1]
    assert live.youngest() == -1


def test_what_nobody_holds_does_not_pile_up():
    live, made = LiveOutputs(), Made(1)
    for _ in range(100):
        made.hand_out()
        assert live.youngest() == -1
        live.push(made)
    assert len(live._stack) == 1


def test_a_discarded_recording_is_forgotten():
    live, first, second = LiveOutputs(), Made(1), Made(2)
    kept = [made.hand_out() for made in (first, second)]
    live.push(first)
    live.push(second)
    live.push(second)
    live.discard(second)
    assert live.youngest() == 1
    assert live.overwritten_by(Made(3)) == []
    assert len(kept) == 2


@pytest.mark.parametrize(("held", "safe"), [(1, True), (2, False), (3, False)])
def test_a_replay_overwrites_its_own_outputs_and_those_of_younger_ones(held, safe):
    live, recordings = LiveOutputs(), {birth: Made(birth) for birth in (1, 2, 3)}
    handed = recordings[held].hand_out()
    live.push(recordings[held])
    assert live.is_safe(recordings[2]) is safe
    expected = [] if safe else [(recordings[held], [0])]
    assert live.overwritten_by(recordings[2]) == expected
    del handed
    assert live.is_safe(recordings[2])
    assert live.overwritten_by(recordings[2]) == []


@pytest.mark.parametrize(("block", "safe"), [(0, False), (1, True)])
def test_a_replay_overwrites_older_blocks_that_were_free_when_it_was_made(block, safe):
    live, old = LiveOutputs(), Made(1, count=2)
    made = Made(2, released={1: (0,)})
    handed = old.hand_out()[block]
    live.push(old)
    assert live.is_safe(made) is safe
    assert live.overwritten_by(made) == ([] if safe else [(old, [0])])
    assert live.is_safe(Made(2)), "made while both were kept"
    del handed
    assert live.is_safe(made)


def test_only_blocks_that_are_held_are_overwritten():
    live, made = LiveOutputs(), Made(1, count=3)
    handed = made.hand_out()
    del handed[1]
    for _ in range(2):
        live.push(made)
    assert live.overwritten_by(made) == [(made, [0, 2])], "once, however often it was handed out"
