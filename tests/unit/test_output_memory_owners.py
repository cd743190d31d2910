"""Who owns the memory under outputs, and when it goes."""

import gc
import weakref

import torch

from cgpass import torch_private
from cgpass.runtime.outputs import OutputMemory
from tests.unit.memories import (
    SHOWN,
    hand_out,
    ramps,
    seal,
    users,
)


class Watched:
    """Memory, and whether the driver's outputs under it are still alive."""

    def __init__(self, count=1):
        outputs = ramps(count)()
        self._owners = [torch_private.WeakStorage(t.untyped_storage()) for t in outputs]
        self.memory = OutputMemory(outputs, [SHOWN] * count)
        del outputs
        self.memory.seal()

    def alive(self):
        return [weak.get() is not None for weak in self._owners]


def test_blocks_are_kept_until_they_are_released():
    watched = Watched(2)
    memory = watched.memory
    assert memory.released() == ()
    held = hand_out(memory)[0]
    memory.release_unheld()
    assert memory.released() == (1,)
    assert watched.alive() == [True, False]
    del held
    assert memory.released() == (1,), "nobody asked yet"
    memory.release_unheld()
    assert memory.released() == (0, 1)
    assert watched.alive() == [False, False]


def test_a_released_block_may_still_be_held_later():
    buffer = torch.arange(4.0)  # stands for the pool
    memory = seal(lambda: [buffer[:]])
    memory.release_unheld()
    (tensor,) = hand_out(memory)
    assert memory.held(memory.released()) == [0]
    memory.rescue([0])
    buffer.fill_(5)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_block_is_given_and_taken_back():
    watched = Watched()
    memory = watched.memory
    (address,) = memory.addresses()
    assert memory.num_users(address + 8) is None
    number, references = memory.num_users(address)
    assert (number, references) == (0, users(memory.tensors[0]))
    storage = memory.give(0)
    assert storage.data_ptr() == address
    assert memory.num_users(address) is None
    assert memory.released() == (0,)
    memory.take_back(0, storage)
    del storage
    assert memory.num_users(address) == (number, references)
    assert watched.alive() == [True]
    memory.give(0)
    assert watched.alive() == [False]


def test_letting_go_leaves_kept_blocks_to_their_holders_without_a_copy():
    watched = Watched(2)
    held = hand_out(watched.memory)[0]
    address = held.data_ptr()
    assert watched.memory.let_go() == 0
    assert held.data_ptr() == address
    del watched.memory
    gc.collect()
    assert watched.alive()[1] is False
    others = [torch.full((4,), -1.0) for _ in range(64)]
    assert address not in {t.data_ptr() for t in others}
    assert held.tolist() == [0, 1, 2, 3]


def test_letting_go_copies_what_was_released_and_is_held():
    buffer = torch.arange(8.0)  # stands for the pool
    memory = seal(lambda: [buffer[:], torch.arange(4.0)])
    kept = hand_out(memory)[1]
    memory.release_unheld()
    held = hand_out(memory)[0]
    assert memory.released() == (0,)
    assert memory.let_go() == 32
    del memory
    buffer.fill_(-1)
    assert held.tolist() == [*range(8)]
    assert kept.tolist() == [0, 1, 2, 3]
    assert held.data_ptr() != buffer.data_ptr()


def test_rescued_memory_goes_with_its_last_holder():
    memory = seal(ramps(1))
    (held,) = hand_out(memory)
    memory.rescue([0])
    weak = torch_private.WeakStorage(held.untyped_storage())
    gone = weakref.ref(held)
    del held
    assert gone() is None
    assert weak.get() is None
