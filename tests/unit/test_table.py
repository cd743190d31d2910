"""Keys that were seen, recordings of each, and that neither grows."""

import itertools

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime.table import RecordingTable, Seen

births = itertools.count()


class Recorded:
    """A recording, as far as the table looks at it."""

    def __init__(self, made_for=(), *, held=False):
        self.made_for, self.held, self.memory, self.birth = made_for, held, self, next(births)

    def any_held(self):
        return self.held


def seen(name, *tensors):
    storages = [t.untyped_storage() for t in tensors]
    return Seen(((name,), b""), {s._cdata: torch_private.WeakStorage(s) for s in storages}, [])


def sizes(table):
    recorded = sum(bool(each.recordings) for each in table.seen())
    return len(table.seen()), len(table.seen()) - recorded


def test_recordings_are_found_by_keys_and_by_where_values_lie():
    table, one, two = RecordingTable(4), Recorded(), Recorded()
    assert table.get(("a",), b"") is None
    known = table.remember(seen("a"))
    assert table.remember(seen("a")) is known, "what was learnt stays known to its recordings"
    known.recordings |= {b"1": [one], b"2": [two]}
    assert table.recordings(("a",), b"", b"1") == [one]
    assert table.all() == [one, two]
    newer = table.remember(seen("b"))
    assert (table.newest(), table.newest(("a",)), table.newest(("c",))) == (
        newer.key,
        known.key,
        None,
    )
    dropped = table.drop(lambda each, r: each is known and r is one)
    assert (dropped, known.recordings, known.cause[0]) == ([one], {b"2": [two]}, "anew")
    assert table.clear() == [two]
    assert table.get(*known.key) is None


def test_room_is_counted_for_each_set_of_storages():
    table, known = RecordingTable(2), seen("a")
    table.remember(known)
    for made_for in ((1, 2), (3,), (1, 2)):
        assert table.has_room(made_for)
        known.recordings.setdefault(b"", []).append(Recorded(made_for))
    found = [table.has_room(each) for each in ((1, 2), (2, 1), (3,), ())]
    assert found == [False, True, True, True]


@pytest.mark.parametrize("held", [False, True])
def test_recordings_go_with_what_they_read_in_place(held):
    table, stays, goes = RecordingTable(4), torch.ones(2), torch.ones(2)
    recordings = [Recorded(), Recorded(held=held)]
    table.remember(seen("a", stays)).recordings[b""] = [recordings[0]]
    table.remember(seen("b", stays, goes)).recordings[b""] = [recordings[1]]
    table.remember(seen("c", goes))
    assert table.drop_gone() == []
    del goes
    assert table.drop_gone() == ([] if held else [recordings[1]])
    assert table.all() == (recordings if held else recordings[:1])
    assert sizes(table) == (1 + held, 0)
