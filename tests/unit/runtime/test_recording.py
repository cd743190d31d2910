"""Outputs that share memory with inputs of their call, and what is copied of inputs that are written."""

import pytest
import torch

from tests.unit.runtime.runners import COPIED, runner


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
