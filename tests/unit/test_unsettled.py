"""Calls that do nothing but warm up: what is remembered of them, and what is said."""

import logging
import re
from random import Random

import pytest
import torch
from expecttest import assert_expected_inline

import cgpass
from cgpass.inputs import InputKind
from cgpass.runtime import fast, unsettled
from tests.unit.runners import COPIED, STATIC, SYMINT, call, counts, runner

X = torch.ones(2)
needs_swaps = pytest.mark.skipif("not fast.can_swap()", reason="storages can't be swapped")


def messages(caplog, level=logging.WARNING):
    found = [r.getMessage() for r in caplog.records if r.levelno == level]
    said = ("never recorded", "copied from now", "to be copied", "can't be copied")
    return [text for text in found if any(words in text for words in said)]


def test_an_integer_that_never_repeats_is_said_once(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    for n in range(63):
        call(run, X, n)
    call(run, X, 63)
    assert messages(caplog) == []
    for n in range(64, 200):
        assert call(run, X, n) == [[n + 1.0] * 2]
    (message,) = messages(caplog)
    assert_expected_inline(
        message,
        """\
forward captured_0: 64 calls in a row were never recorded, since the number x1 (64 in this call, read at model.py:1 in forward: code) takes new values all the time. Pass it as a 0-dim tensor on the device.""",
    )
    assert counts(run) == (200, 0, 0, 0)


def test_parameters_that_are_always_new_are_copied_and_said_once(caplog):
    run = runner(lambda x, w: [x + w], COPIED, STATIC)
    weights = [torch.full((2,), float(i)) for i in range(300)]
    for i, weight in enumerate(weights):
        assert call(run, X, weight) == [[i + 1.0] * 2]
    (message,) = messages(caplog)
    assert_expected_inline(
        message,
        """forward captured_0: 256 calls came with other tensors for x1 (float32[2], moved 256 times, read at model.py:1 in forward: code), or with these elsewhere: they are copied from now on. Write new values into parameters and buffers (copy_) instead of replacing them; if so many modules share the code, raise max_static_sets.""",
    )
    assert counts(run) == (257, 2, 43, 0), "once more as X never moves"


def small_and_large(**kwargs):
    """A runner whose parameters are a large one and a small one, and the large one."""
    run = runner(lambda x, w, b: [x * w[:2] + b], COPIED, STATIC, STATIC, **kwargs)
    return run, torch.arange(100.0)


def test_a_buffer_that_is_always_new_is_copied_and_the_rest_read_in_place(caplog):
    run, large = small_and_large()
    kept = [torch.full((2,), float(i)) for i in range(100)]
    for i, small in enumerate(kept):
        assert call(run, X, large, small) == [[i, i + 1.0]]
    (message,) = messages(caplog)
    assert "64 calls came with other tensors for x2 (float32[2], moved 64 times, read at" in message
    assert message.endswith("instead of replacing them.")
    assert counts(run) == (65, 2, 35, 0), "once more as X never moves"
    assert run.layout.parameters == (1,)
    other = large + 1
    for _ in range(3):
        assert call(run, X, other, X) == [[2, 3]]
    assert run.stats.recordings == 3


def test_a_written_buffer_that_is_always_new_is_written_back():
    def add(x, w, b):
        b.add_(x)
        return [w[:2] * b]

    run = runner(add, COPIED, STATIC, STATIC, mutated={2})
    large, kept = torch.ones(100), [torch.full((2,), float(i)) for i in range(100)]
    for i, small in enumerate(kept):
        assert call(run, X, large, small) == [[i + 1.0] * 2]
        assert small.tolist() == [i + 1.0] * 2
    assert run.stats.replays > 30


def test_written_memory_that_is_shared_is_not_copied(caplog):
    run = runner(lambda x, w, b: [b.add_(x) * w[:2]], COPIED, STATIC, STATIC, mutated={2})
    kept = [torch.full((100,), float(i)) for i in range(300)]
    parts = [both[2:4] for both in kept]
    for i, (both, part) in enumerate(zip(kept, parts, strict=True)):
        assert call(run, X, both, part) == [[i * (i + 1.0)] * 2]
    (message,) = messages(caplog)
    assert "256 calls in a row were never recorded" in message
    assert run.stats.replays == 0


def test_a_few_buffers_that_take_turns_are_not_copied(caplog):
    run, large = small_and_large()
    few = [torch.full((2,), float(i)) for i in range(10)]
    for _ in range(30):
        for small in few:
            call(run, X, large, small)
    assert messages(caplog) == []
    assert counts(run) == (10, 20, 290, 0), "once more as X never moves"


def test_new_buffers_now_and_then_are_not_copied(caplog):
    run, large = small_and_large()
    kept = [torch.full((2,), float(i)) for i in range(150)]
    for small in kept:
        for _ in range(3):  # warm up, record, replay
            call(run, X, large, small)
    assert messages(caplog) == []
    assert run.layout.parameters == (1, 2)


def test_a_buffer_that_is_moved_by_its_data_is_copied(caplog):
    run, large = small_and_large()
    small, kept = torch.zeros(2), []
    for i in range(100):
        kept.append(small.data)
        small.data = torch.full((2,), float(i))
        assert call(run, X, large, small) == [[i, i + 1.0]]
    assert "64 calls came with other tensors for x2" in messages(caplog)[0]
    assert run.layout.parameters == (1,)


def test_all_parameters_that_are_moved_by_their_data_are_copied(caplog):
    run = runner(lambda x, w: [x * w], COPIED, STATIC)
    weight, kept = torch.zeros(2), []
    for i in range(100):
        kept.append(weight.data)
        weight.data = torch.full((2,), float(i))
        assert call(run, X, weight) == [[float(i)] * 2]
    (message,) = messages(caplog)
    assert "64 calls came with other tensors for x1 (float32[2], moved 64 times" in message
    assert "max_static_sets" not in message
    assert run.layout.parameters == ()
    assert counts(run)[2:] == (98, 0)


class Freed:
    """Parameters whose storages are freed after each use and allocated again before the next, among given places."""

    def __init__(self, sizes, num_places):
        self.parameters = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
        self.places = [torch.zeros(max(sizes)) for _ in range(num_places)]
        self.number = 0

    def next(self, i):
        """A parameter, allocated where the next place is."""
        parameter, value = self.parameters[i], float(i + 1)
        place = self.places[self.number % len(self.places)]
        self.number += 1
        if len(place) != len(parameter):
            place = self.places[self.number % len(self.places)] = torch.zeros(len(parameter))
        if not parameter.untyped_storage().nbytes():
            parameter.untyped_storage().resize_(place.nbytes)
        fast.swap_storages([parameter], [place])
        self.lies_in = place
        return parameter.fill_(value)

    def put_away(self, i):
        """Have the last place free again, and the parameter without memory."""
        fast.swap_storages([self.parameters[i]], [self.lies_in])
        self.parameters[i].untyped_storage().resize_(0)


@needs_swaps
@pytest.mark.parametrize("num_places", [2, 500])
def test_many_layers_whose_parameters_come_to_the_same_places_share_a_pool(caplog, num_places):
    """As FSDP gathers them: more layers than calls whose results may be held, each in a pool of its own."""
    run = runner(lambda x, w: [x * w], COPIED, STATIC)
    run.visible, run.read = frozenset(), frozenset({0})  # saved for the backward
    freed, slots = Freed([2] * 20, num_places), set()
    for step in range(12):
        held = []
        for i in range(20):
            parameter = freed.next(i)
            held.append(run.run([X, parameter])[0])
            freed.put_away(i)
        assert [out.tolist() for (out,) in held] == [[i + 1.0] * 2 for i in range(20)]
        slots.update(recording.slot for recording in run.table.all())
        if step == 8:
            before = counts(run)
    assert counts(run)[:2] == before[:2], "nothing new is recorded"
    assert run.stats.plain_calls == 0
    assert slots == {0}
    assert "still referenced" not in caplog.text


def test_modules_whose_buffers_are_always_new_get_pools_for_what_is_held():
    """They are no layers that are gathered in one place."""
    run = runner(lambda x, w, b: [x * w + b], COPIED, STATIC, STATIC)
    run.visible, run.read = frozenset(), frozenset({0})
    weight, held = torch.ones(2), []
    for i in range(600):
        (out,), _ = run.run([X, weight, torch.full((2,), float(i))])
        held = [*held[-2:], (out, i)]
        for value, expected in held:
            assert value.tolist() == [expected + 1.0] * 2
        del out, value
    assert run.stats.recordings < 60
    assert run.stats.plain_calls == 0


@needs_swaps
def test_small_parameters_that_may_not_be_copied_are_said_so(caplog):
    """A written input shares memory with another."""
    run = runner(lambda x, y, w: [x.add_(w), y * 1], STATIC, STATIC, STATIC, mutated=(0,))
    memory, freed = torch.zeros(4), Freed([2], 500)
    for _ in range(20):
        call(run, memory[:2], memory[1:3], freed.next(0))
    (message,) = messages(caplog)
    assert "They can't be copied, since an input that is written shares memory with" in message
    assert run.layout.parameters == (0, 1, 2)


@needs_swaps
def test_what_was_recorded_while_parameters_moved_is_laid_out_anew():
    """What others recorded, too, as soon as nothing is held: the step's end."""
    run, freed = runner(lambda x, w: [x * w], COPIED, STATIC), Freed([2] * 3, 500)
    run.visible, run.read = frozenset(), frozenset({0})
    other = runner(lambda x: [x + 1], COPIED, owner=run.owner)
    promoted_in = None
    for step in range(6):
        held = [other.run([X])[0]]
        assert held[0][0].tolist() == [2.0] * 2
        for i in range(3) if step else (0, 0, 1, 2):
            held.append(run.run([X, freed.next(i)])[0])
            if promoted_in is None and run.layout.parameters == ():
                promoted_in, before = step, other.stats.recordings
        assert promoted_in is None or step > promoted_in or other.stats.recordings == before
        held.clear()
    assert promoted_in == 2
    assert (before, other.stats.recordings) == (1, 2)
    assert run.stats.plain_calls == 1, (
        "the rest of the step: nothing is recorded that would go at once"
    )


@needs_swaps
def test_storages_that_always_lie_elsewhere_are_copied_if_they_are_few_bytes(caplog, monkeypatch):
    monkeypatch.setattr(unsettled, "TINY", 0)
    run, freed = runner(lambda x, w: [x * w], COPIED, STATIC), Freed([2, 2, 2], 500)
    for _ in range(40):
        for i in range(3):
            assert call(run, X, freed.next(i)) == [[i + 1.0] * 2]
    (message,) = messages(caplog)
    assert_expected_inline(
        message,
        """forward captured_0: the storages of x1 (float32[2], moved 18 times, read at model.py:1 in forward: code) are freed and allocated again between calls (as FSDP does), and lay elsewhere in 18 calls. They are copied from now on: 8 bytes a call.""",
    )
    assert run.layout.parameters == ()
    # warm-ups: a first one each, five moves each, then some as copied; one recording for all, once more as X never moves
    assert counts(run) == (21, 2, 120 - 21, 0)


@needs_swaps
def test_storages_that_take_turns_between_few_places_are_not_copied(caplog):
    """As in CUDA's caching allocator, where a step allocates what the last one did."""
    run, freed = runner(lambda x, w: [x * w], COPIED, STATIC), Freed([2, 2, 2], 4)
    places = set()
    for number in range(200):
        parameter = freed.next(number % 3)
        places.add(parameter.data_ptr())
        assert call(run, X, parameter) == [[number % 3 + 1.0] * 2]
    assert messages(caplog) == []
    assert run.layout.parameters == (1,)
    assert len(places) == 7, "four, and where each of three was made"
    assert counts(run) == (7, 14, 193, 0), "once more as X never moves"


@needs_swaps
def test_the_smallest_parameters_are_copied_soon(caplog):
    caplog.set_level(logging.INFO, "cgpass")
    run = runner(lambda x, a, b: [x * a + b[:2]], COPIED, STATIC, STATIC)
    small, large = Freed([2, 2, 2], 500), Freed([unsettled.TINY] * 3, 3)
    for _ in range(40):
        for i in range(3):
            found = call(run, X, small.next(i), large.next(i))
            assert found == [[2 * i + 2.0] * 2]
    assert messages(caplog) == []
    (message,) = [m for m in messages(caplog, logging.INFO) if "freed and allocated" in m]
    assert message.endswith("in 6 calls. They are copied from now on: 8 bytes a call.")
    assert run.layout.parameters == (2,)


@needs_swaps
def test_many_bytes_are_not_copied(caplog, monkeypatch):
    monkeypatch.setattr(unsettled, "SMALL", 100)
    monkeypatch.setattr(unsettled, "TINY", 0)
    run, freed = runner(lambda x, w: [x * w[:2]], COPIED, STATIC), Freed([64], 500)
    for _ in range(40):
        assert call(run, X, freed.next(0)) == [[1.0] * 2]
    (message,) = messages(caplog)
    assert message.endswith(
        "They have 256 bytes, too many to be copied: such calls run without a graph. What is gathered in the "
        "compiled function itself is replayed: see simple_fsdp in examples/train_distributed.py."
    )
    assert run.layout.parameters == (1,)
    assert counts(run) == (40, 0, 0, 0)


@needs_swaps
@pytest.mark.parametrize(("num_places", "tiny"), [(18, unsettled.TINY), (20, 0)])
def test_many_layers_at_random_places_settle(monkeypatch, num_places, tiny):
    """More combinations of places than may be recorded, each of which comes back at times."""
    monkeypatch.setattr(unsettled, "TINY", tiny)
    run = runner(lambda x, a, b: [x * a + b], COPIED, STATIC, STATIC)
    freed, random = [Freed([2] * 70, num_places) for _ in range(2)], Random(1)
    plain = 0
    for _ in range(45):
        for i in range(70):
            for each in freed:
                each.number = random.randrange(num_places)
            given = [each.next(i) for each in freed]
            assert call(run, X, *given) == [[2 * i + 2.0] * 2]
            for each in freed:
                each.put_away(i)
        before, plain = plain, run.stats.plain_calls
    assert run.layout.parameters == ()
    assert plain == before, "nothing runs plainly in the end"
    if tiny:
        assert counts(run)[1] < 140


@needs_swaps
def test_storages_that_come_back_once_are_recorded_again(monkeypatch):
    monkeypatch.setattr(unsettled, "TINY", 0)
    run, freed = runner(lambda x, w: [x * w], COPIED, STATIC), Freed([2], 500)
    for _ in range(3):
        parameter = freed.next(0)
        for _ in range(10):
            assert call(run, X, parameter) == [[1.0] * 2]
    assert run.layout.parameters == (1,)
    assert counts(run)[:2] == (3, 3)


def test_layers_that_share_code_are_not_said_anything_of(caplog):
    run = runner(lambda x, n, w: [x + w + n], COPIED, SYMINT, STATIC)
    weights = [torch.full((2,), float(i)) for i in range(100)]
    for n in range(5):
        for weight in weights:
            call(run, X, n, weight)
    for _ in range(3):
        for n in range(50):  # sizes that come back
            call(run, X, n, weights[0])
    assert messages(caplog) == []


def test_replays_in_between_start_the_count_anew(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    for n in range(1000, 1300):
        call(run, X, n)
        for _ in range(2):
            call(run, X, 1)
    assert messages(caplog) == []
    assert run.stats.replays > 0


def test_silent_skips_are_said_for_information_only(caplog):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT, settings={"on_skip": "silent"})
    with caplog.at_level(logging.INFO, "cgpass"):
        for n in range(100):
            call(run, X, n)
    assert messages(caplog) == []
    assert len(messages(caplog, logging.INFO)) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_remembered_of_integers_is_bounded(recorded):
    run = runner(lambda x, n: [x + n], COPIED, SYMINT)
    if recorded:
        for _ in range(3):
            call(run, X, -1)
    for n in range(2000):
        call(run, X, n)
    assert len(run.table._shapes) <= 1024
    if recorded:
        assert call(run, X, -1) == [[0, 0]]
        assert counts(run) == (2001, 1, 3, 0), "what is recorded stays"
    for _ in range(2):
        call(run, X, 1999)
    assert run.stats.recordings == 1 + recorded, "what came last is remembered"


def test_a_wrapper_names_the_input(caplog):
    wrapped = cgpass.CUDAGraphWrapper(
        lambda x: x * 2, options={"driver": "simulated"}, name="doubled"
    )
    for size in range(1, 100):
        wrapped(torch.ones(size))
    (message,) = messages(caplog)
    assert message.startswith("doubled: 64 calls in a row were never recorded")
    assert message.endswith(
        "since each came with another size or layout of input 0. Keep to a few sizes: pad it."
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda i: (torch.ones(i + 2, 4), 1),
            "since the first dimension of x (N in this call) takes new values all the time. Keep to a few sizes: pad the batch, or drop the last one (drop_last=True).",
        ),
        (
            lambda i: (torch.ones(3, i + 2), 1),
            "since the second dimension of x (N in this call) takes new values all the time. Pad the second dimension to a few sizes.",
        ),
        (
            lambda i: (torch.ones(3, 4), i + 2),
            "since the number n (N in this call, read at test_unsettled.py:NN in scaled: return (x * n).sin()) takes new values all the time. Pass it as a 0-dim tensor on the device.",
        ),
    ],
)
def test_what_never_repeats_in_a_compiled_function_has_the_remedy_that_fits(caplog, make, said):
    def scaled(x, n):
        return (x * n).sin()

    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    fn = torch.compile(scaled, backend="cgpass", options=options)
    for i in range(70):
        fn(*make(i))
    (message,) = messages(caplog)
    message = (
        re.sub(r"\.py:\d+", ".py:NN", message).replace("(66 in", "(N in").replace("(67 in", "(N in")
    )
    assert message.endswith(f" 64 calls in a row were never recorded, {said}")


def test_an_object_that_is_always_another_is_to_be_the_same(caplog):
    run = runner(lambda x, g: [x + 1], COPIED, InputKind.OPAQUE)
    for each in [object() for _ in range(70)]:
        call(run, X, each)
    (message,) = messages(caplog)
    assert "each came with another object for x1 (read at" in message
    assert message.endswith("Pass the same one in each call.")


def test_other_parameters_in_each_call_are_to_be_written_in_place(caplog):
    run = runner(lambda x, w, b: [b.add_(x) * w[:2]], COPIED, STATIC, STATIC, mutated={2})
    kept = [torch.full((100,), float(i)) for i in range(300)]
    for both in kept:
        call(run, X, both, both[2:4])
    (message,) = messages(caplog)
    assert "since each came with other tensors for x1" in message
    assert message.endswith(
        ". Write new values into parameters and buffers (copy_) instead of replacing them."
    )
