"""Jagged tensors: those of equal sizes share recordings, whatever their offsets are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F


def jagged(session, *lengths):
    rows = [session.randn(length, 8) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


FUNCTIONS = {
    "of its shape": lambda x: F.gelu(x) * 2,
    "transposed": lambda x: (x.sin() * 2).transpose(1, 2),
    "in heads": lambda x: (x.sin() * 2).unflatten(-1, (2, 4)).cos(),
    "with its values": lambda x: (x.sin() * 2, x.values().cos() + 1),
}


def steps(fn):
    def program(session):
        layer, _ = session.compiled(lambda: nn.Linear(8, 8))
        call = session.compile(lambda x: fn(layer(x)))
        results = []
        for lengths in [(3, 4)] * 6 + [(4, 3)] * 3 + [(5, 3, 1)] * 3:
            x = jagged(session, *lengths)
            result, *others = torch.utils._pytree.tree_leaves(call(x))
            assert result.shape[0] == x.shape[0]
            (result + result.sin()).values().sum().backward()
            results += [result.values(), result.offsets(), x.grad.values(), *others]
        return [*results, layer.weight.grad]

    return program


@pytest.mark.parametrize("name", FUNCTIONS)
def test_new_offsets_of_equal_sizes_replay(way, name):
    counters = way.compare(steps(FUNCTIONS[name]), min_partition_ops=1)
    assert counters["recordings"] <= 4
    assert counters["replays"] >= counters["calls"] - 6


def test_results_go_together_with_the_very_input_of_the_call(slow_way):
    def program(session):
        call = session.compile(lambda x: F.gelu(x.sin()) * 2)
        results = []
        for _ in range(5):
            x = jagged(session, 3, 4)
            result = call(x)
            assert result.shape[1] == x.shape[1]
            results.append((result + x).values().detach())
            with pytest.raises(RuntimeError, match=r"shape|ragged"):
                result + jagged(session, 3, 4)
        return results

    counters = slow_way.compare(program, min_partition_ops=1)
    assert counters["replays"] == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_totals_that_change_are_sizes_of_their_own(way, in_place):
    """Beside the number of rows, which stays; batches lie in one buffer, which may come to be read in place, or not."""

    def program(session):
        layer, _ = session.compiled(lambda: nn.Linear(8, 8))
        call = session.compile(lambda x: F.gelu(layer(x)) * 2)
        memory = session.randn(32, 8)
        results = []
        for total in [6] * 20 + [9, 4, 6, 9, 6]:
            values = memory[:total] if in_place else memory[:total].clone()
            offsets = torch.tensor([0, 2, 3, total], device=memory.device)
            x = torch.nested.nested_tensor_from_jagged(values, offsets)
            result = call(x)
            result.values().sum().backward()
            results += [result.values(), result.offsets()]
        return [*results, layer.weight.grad]

    counters = way.compare(program, min_partition_ops=1)
    assert counters["replays"] > 0
