"""Placeholders keep an input's layout, outputs keep theirs and what they share."""

import pytest
import torch

from cgpass.runtime.inputs import Placeholder, flat_view
from cgpass.runtime.recording import Recording
from cgpass.runtime.simulated import SimulatedDriver


def test_the_flat_view_spans_first_to_last_element():
    value = torch.arange(20.0).view(4, 5)[1:3, 1:4]
    assert flat_view(value).tolist() == [6, 7, 8, 9, 10, 11, 12, 13]
    assert flat_view(torch.empty(0, 3)).tolist() == []


def make(fn, *inputs, static=(), mutated=(), **settings):
    placeholders = {
        i: Placeholder(value)
        for i, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and i not in static
    }
    staged = [placeholders[i].tensor if i in placeholders else v for i, v in enumerate(inputs)]
    for i, placeholder in placeholders.items():
        placeholder.copy_from(inputs[i])
    graph, outputs = SimulatedDriver().record(lambda args: fn(*args), staged, opaque=False)
    recording = Recording(graph, outputs, staged, placeholders, frozenset(mutated), **settings)
    del outputs
    recording.memory.seal()
    return recording


def test_a_mutated_input_is_written_back_and_counted_twice():
    x, y = torch.zeros(4), torch.zeros(2, dtype=torch.float64)
    recording = make(lambda x, y: [x.add_(1).clone(), y + 1], x, y, mutated=(0,))
    assert recording.copied_bytes == 16 + 16 + 16
    x = torch.arange(4.0)
    assert recording.run([x, y])[0].tolist() == [1, 2, 3, 4]
    assert x.tolist() == [1, 2, 3, 4]


def test_an_output_that_is_an_input_is_the_calls_own():
    recording = make(lambda x: [x, x.add_(1), x[1:], x.t()], torch.zeros(2, 2), mutated=(0,))
    x = torch.ones(2, 2)
    same, added, part, transposed = recording.run([x])
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

    recording = make(fn, torch.zeros(3, dtype=torch.complex64), torch.arange(8.0)[2:6])
    x, base = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j]), torch.arange(100.0, 110.0)
    pairs, real, part, wide, conjugate = recording.run([x, base[4:8]])
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
        recording.run([x, base[5:9]])
    assert torch.equal(x, before)
