"""Outputs: their holders, moves of held ones, the owners of their memory, and their end."""

import gc

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.outputs import OutputMemory

SHOWN, BOTH, INTERNAL = (True, False), (True, True), (False, True)


def seal(make, *uses):
    """The memory of the outputs that `make` returns; nobody else holds them."""
    outputs = make()
    memory = OutputMemory(outputs, uses or [SHOWN] * len(outputs))
    del outputs
    memory.seal()
    return memory


def ramps(count):
    """Outputs of four elements each, on blocks of their own."""
    return lambda: [torch.arange(4.0) + 10 * n for n in range(count)]


def replay(memory, value=-1):
    """Overwrite the blocks where they lie, as the graph does."""
    for address, tensor in zip(memory.addresses(), memory.tensors, strict=True):
        raw = torch_private.storage_at(address, tensor.untyped_storage().nbytes(), tensor.device)
        torch.empty(0).set_(raw).fill_(value)


def test_what_is_held_as_storages_alone_comes_back_to_where_it_lay():
    memory = seal(ramps(3))
    memory.hand_out(1)
    assert [t.tolist() for t in memory.aliases()] == [[0, 1, 2, 3]]
    with torch.inference_mode():
        assert len(memory.aliases()) == 1
    assert not memory.any_held()
    blocks = memory.blocks()
    held = [memory.watch[0][blocks[n]] for n in (1, 2)]
    assert memory.held() == [1, 2]
    memory.rescue([1, 2])
    assert held[0] is not memory.watch[0][blocks[1]]
    replay(memory)
    memory.fill([blocks[1], blocks[2]], held)
    assert [t.tolist() for t in memory.tensors] == [[-1] * 4, [10, 11, 12, 13], [20, 21, 22, 23]]
    assert not memory.any_held()


@pytest.mark.parametrize("lazy", [torch._conj, torch._neg_view])
def test_lazy_bits_stay(lazy):
    value = torch.tensor([1 + 2j, 3 - 1j])
    expected = lazy(value.clone()).tolist()
    memory = seal(lambda: [lazy(value.clone())])
    (tensor,) = memory.aliases()
    assert (tensor.is_conj(), tensor.is_neg()) == (lazy is torch._conj, lazy is torch._neg_view)
    for _ in range(2):
        assert tensor.tolist() == expected
        memory.rescue(memory.held())


@pytest.mark.parametrize(
    ("uses", "held", "asked", "expected"),
    [
        ([INTERNAL], [0], [0], False),
        ([SHOWN, INTERNAL], [0, 1], [0, 1], False),
        ([SHOWN, INTERNAL], [0, 1], [0], True),
        ([BOTH, INTERNAL], [0, 1], [0], False),  # the backward is to come
        ([BOTH, INTERNAL], [0], [0], True),
        ([BOTH, SHOWN], [0], [0], True),
    ],
)
def test_what_may_move(uses, held, asked, expected):
    memory = seal(ramps(len(uses)), *uses)
    kept = [t for n, t in enumerate(memory.aliases()) if n in held]
    assert memory.can_rescue(asked) is expected
    del kept


def assert_owned(held):
    gc.collect()
    others = [torch.full((4,), -1.0) for _ in range(64)]
    assert held.data_ptr() not in {t.data_ptr() for t in others}
    assert held.tolist() == [0, 1, 2, 3]


def test_letting_go_may_be_broken_off_once_memory_is_the_holders(monkeypatch):
    memory, swap = seal(ramps(1)), fast.swap_storages
    held = memory.aliases()[0]

    def swap_and_stop(bases, owners):
        monkeypatch.setattr(fast, "swap_storages", swap)
        swap(bases, owners)
        raise KeyboardInterrupt

    monkeypatch.setattr(fast, "swap_storages", swap_and_stop)
    with pytest.raises(KeyboardInterrupt):
        memory.let_go()
    memory.let_go()
    del memory
    assert_owned(held)
