"""Outputs that share memory with inputs of their call, and what is copied of inputs that are written."""

import pytest
import torch

from cgpass.compile.facts.input_info import InputKind
from tests.unit.runtime.runners import COPIED, call, counts, infos, partition, runner


def recorded(fn, *inputs, **settings):
    """A runner that has recorded a function, and its recording."""
    run = runner(fn, *[COPIED] * len(inputs), **settings)
    for _ in range(2):
        _, recording = run.run([*inputs])
    return run, recording


def test_an_output_that_is_an_input_is_the_calls_own():
    run, recording = recorded(
        lambda x: [x, x.add_(1), x[1:], x.t()], torch.zeros(2, 2), mutated=(0,)
    )
    assert recording.copied_bytes == 16 + 16, "it is written back"
    x = torch.ones(2, 2)
    same, added, part, transposed = run.run([x])[0]
    assert same is x
    assert added is x
    assert part.data_ptr() == x[1:].data_ptr()
    assert transposed.stride() == x.t().stride()
    assert transposed.data_ptr() == x.data_ptr()
    assert x.tolist() == [[2, 2], [2, 2]]
    assert recording.memory.addresses() == []


def test_a_view_of_an_input_keeps_its_type_and_place():
    def fn(x, y):
        return [torch.view_as_real(x)[1:], x.real, y[1:], y.view(torch.float64), x.conj()[1:]]

    run, recording = recorded(fn, torch.zeros(3, dtype=torch.complex64), torch.arange(8.0)[2:6])
    x, base = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j]), torch.arange(100.0, 110.0)
    pairs, real, part, wide, conjugate = run.run([x, base[4:8]])[0]
    assert conjugate.tolist() == [3 - 4j, 5 - 6j]
    assert pairs.tolist() == [[3, 4], [5, 6]]
    assert real.tolist() == [1, 3, 5]
    assert part.tolist() == [105, 106, 107]
    assert wide.data_ptr() == base[4:].data_ptr()
    for view in (pairs, real, part, wide):
        view.fill_(0)
    assert (x.sum().item(), base[4:8].sum().item()) == (2j, 0)
    before, recording.replay = x.clone(), lambda: pytest.fail("it would write")
    with pytest.raises(RuntimeError, match=r"torch.float64: .* must be divisible by 8, but is 20"):
        run.run([x, base[5:9]])
    assert torch.equal(x, before)


X = torch.ones(4)


def maker(fn, owner=None):
    """A partition whose outputs other partitions read, and the user never gets."""
    run = runner(fn, COPIED, owner=owner)
    run.uses = [(False, True)] * len(fn(X))
    return run


def boxed(fn, owner, num_inputs=1, **settings):
    """A partition that takes a list, which it may empty, and reads what others made."""
    pooled = infos(*[InputKind.POOLED] * num_inputs)
    return partition(fn, pooled, owner, "backward captured_0", **settings)


def drops_its_input(args):
    """Its result lies where its input lay, once that has died."""
    (a,) = args
    args.clear()
    b = a + 1
    del a
    c = b * 2
    return [c.sum(0, keepdim=True), c]


def pair(second=drops_its_input, **settings):
    first = maker(lambda x: [x * 3])
    return first, boxed(second, first.owner, **settings)


def step(first, second, value):
    """One forward and one backward; the call alone holds what goes from one to the other."""
    made, _ = first.run([X * value])
    outputs, recording = second.run(made)
    return [t.tolist() for t in outputs], recording


def expected(value):
    c = (3 * value + 1) * 2
    return [[4 * c], [c] * 4]


def test_an_input_dies_inside_the_recording():
    first, second = pair()
    for value in range(6):
        found, recording = step(first, second, value)
        assert found == expected(value)
    assert counts(first) == counts(second) == (1, 1, 5, 0)
    (made,) = first.table.all()
    assert recording._consumed == (0,)
    assert made.memory.released() == (0,)
    assert set(recording.memory.addresses()) & set(made.memory.addresses()), "its output lies there"


def test_an_input_that_is_returned_is_taken_back():
    def passes(args):
        (a,) = args
        args.clear()
        return [a, a + 1]

    first, second = pair(passes)
    for value in range(5):
        found, recording = step(first, second, value)
        assert found == [[3 * value] * 4, [3 * value + 1] * 4]
    assert (recording._consumed, first.table.all()[0].memory.released()) == ((), ())


def reads_before(args):
    """Fails to be captured while its input is alive."""
    (a,) = args
    factor = a.sum().item()
    return [t * factor for t in drops_its_input(args)]


def reads_after(args):
    """Fails to be captured when its input has died."""
    out = drops_its_input(args)
    factor = out[0].item()
    return [t * factor for t in out]


@pytest.mark.parametrize(("fn", "taken_back"), [(reads_before, True), (reads_after, False)])
def test_a_failed_capture_returns_what_is_alive(fn, taken_back):
    first, second = pair(fn, on_skip="silent")
    third = runner(lambda x: [x - 1], COPIED, owner=first.owner)
    for value in range(4):
        made, _ = first.run([X * value])
        assert call(third, X) == [[0] * 4]
        (a,) = made
        wanted = [t.tolist() for t in fn([a.clone()])]
        del a
        outputs, recording = second.run(made)
        assert recording is None
        assert [t.tolist() for t in outputs] == wanted
    assert second.failure is not None
    (made,) = first.table.all()
    assert made.memory.released() == (() if taken_back else (0,))
    found = first.owner.block_at(0, made.memory.addresses()[0])
    assert (found is not None) is taken_back


def test_what_somebody_holds_is_not_consumed():
    first, second = pair()
    for value in range(3):
        step(first, second, value)
    (consuming,) = second.table.all()
    for value in range(3, 6):
        made, _ = first.run([X * value])
        held = made[0]
        assert not consuming.may_replay(made)
        outputs, recording = second.run(made)
        assert [t.tolist() for t in outputs] == expected(value)
        assert held.tolist() == [3 * value] * 4
        assert recording is not consuming
        del held, outputs
    assert second.stats.recordings == 2
    assert step(first, second, 6) == (expected(6), consuming)
    assert second.stats.recordings == 2


def test_inputs_on_one_block_are_given_together():
    def two(args):
        a, b = args
        args.clear()
        c = a + b.sum()
        del a, b
        d = c * 2
        return [d.sum(0, keepdim=True), d]

    first = maker(lambda x: (lambda y: [y, y[2:]])(x * 3))
    second = boxed(two, first.owner, 2)
    for value in range(5):
        found, recording = step(first, second, value)
        d = 18 * value
        assert found == [[4 * d], [d] * 4]
    assert sorted(recording._consumed) == [0, 1]
    made, _ = first.run([X])
    held = made[1]
    assert not recording.may_replay(made)
    del held
    assert recording.may_replay(made)
