"""The table of what a call does."""

import itertools

import pytest

from cgpass.runtime.actions import Action, decide

FACTS = ("usable", "warm", "safe", "room")


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_every_combination_has_an_action(given):
    usable, warm, safe, room = given
    if not usable:
        expected = Action.PLAIN
    elif warm and safe:
        expected = Action.REPLAY
    elif not room:
        expected = Action.PLAIN
    else:
        expected = Action.RECORD if warm else Action.WARM_UP
    assert decide(**dict(zip(FACTS, given, strict=True))) is expected


def test_what_is_not_usable_runs_plainly_whatever_else_holds():
    assert decide(usable=False, warm=True, safe=True, room=True) is Action.PLAIN


def test_a_full_table_still_replays():
    assert decide(usable=True, warm=True, safe=True, room=False) is Action.REPLAY


def test_an_unsafe_recording_is_never_replayed():
    assert decide(usable=True, warm=True, safe=False, room=True) is Action.RECORD
    assert decide(usable=True, warm=True, safe=False, room=False) is Action.PLAIN


def test_a_shape_that_may_not_be_recorded_is_not_warmed_up():
    assert decide(usable=True, warm=False, safe=False, room=False) is Action.PLAIN
