"""Changes that an exception breaks off are undone by the next call, and not before."""

import pytest

from cgpass.runtime import changes
from cgpass.runtime.changes import Change, Mode, mend, open_modes


class Noted(Mode):
    """Notes what becomes of it; the first attempts to undo it are broken off."""

    def __init__(self, name, notes, *, fails=0):
        super().__init__()
        self.name, self.notes, self.fails = name, notes, fails

    def begin(self):
        self.notes.append(f"{self.name} begins")

    def undo(self):
        if self.fails:
            self.fails -= 1
            raise KeyboardInterrupt
        self.notes.append(f"{self.name} ends")


def test_what_was_broken_off_inside_ends_before_what_is_around_it():
    notes = []

    def inside():
        with Noted("b", notes, fails=1):
            pass

    with pytest.raises(KeyboardInterrupt), Noted("a", notes):
        inside()
    assert notes == ["a begins", "b begins", "b ends", "a ends"]
    assert not open_modes


def test_the_next_mode_ends_what_was_broken_off():
    notes = []

    def broken_off():
        with Noted("a", notes, fails=1):
            pass

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert len(open_modes) == 1
    with Noted("b", notes):
        assert notes == ["a begins", "a ends", "b begins"]
    assert not open_modes


def test_a_change_is_undone_once_it_is_broken_off():
    known, undone = [], []

    class Counted(Change):
        def undo(self):
            undone.append(self)

    with Counted(known):
        mend(known)
    assert not known
    assert not undone
    with pytest.raises(KeyboardInterrupt), Counted(known):
        raise KeyboardInterrupt
    mend(known)
    mend(known)
    assert len(undone) == 1
    assert not known


def test_a_forked_process_ends_what_other_threads_had_begun():
    notes = []
    mode = Noted("a", notes)
    with mode:
        mode.thread += 1
        changes.forget_other_threads()
        assert notes == ["a begins", "a ends"]
        open_modes.append(mode)
