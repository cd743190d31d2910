"""Who holds an output, how what is held moves, who owns the memory under it, and what a replay would overwrite."""

import gc

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime.outputs import OutputMemory
from tests.unit.memories import (
    BOTH,
    INTERNAL,
    SHOWN,
    found_by_backward,
    gradient_of,
    hand_out,
    ramps,
    replay,
    saved,
    seal,
    users,
)

HOLDERS = {
    "tensor": (lambda t: t, lambda h: h),
    "storage": (torch.Tensor.untyped_storage, lambda h: torch.empty(0).set_(h)),
    "view": (lambda t: t.view(2, 2)[:], lambda h: h.reshape(4)),
    "parameter": (torch.nn.Parameter, lambda h: h.detach()),
    "closure": (lambda t: lambda: t, lambda h: h()),
    "gradient": (gradient_of, lambda h: h.grad),
    "saved for backward": (saved, found_by_backward),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_every_holder_counts_and_a_rescue_moves_it_and_not_the_recording(kind):
    hold, read = HOLDERS[kind]
    memory = seal(ramps(1))
    where = memory.addresses()
    for _ in range(2):
        assert not memory.any_held()
        assert memory.held() == []
        holder = hold(hand_out(memory)[0])
        assert memory.any_held()
        assert memory.held() == memory.held([0]) == [0]
        assert memory.held(()) == []
        kept, holder = holder, None
        del kept
    holder = hold(hand_out(memory)[0])
    assert memory.rescue([0]) == 16
    assert not memory.any_held()
    replay(memory)
    assert read(holder).tolist() == [0, 1, 2, 3]
    assert memory.addresses() == where
    assert [t.data_ptr() for t in memory.tensors] == where
    assert memory.tensors[0].tolist() == [-1] * 4


def enlarge(tensor):
    return tensor.resize_(1000)


def empty(tensor):
    return tensor.untyped_storage().resize_(0)


CHANGES = {"enlarged": enlarge, "emptied": empty, "shared": torch.Tensor.share_memory_}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rescued", [False, True])
def test_what_a_holder_does_to_a_storage_does_not_reach_the_recording(change, rescued):
    memory = seal(ramps(2))
    (where, _), before = memory.addresses(), hand_out(memory)
    if rescued:
        memory.rescue([0])
    tensor = hand_out(memory)[0]
    del before
    CHANGES[change](tensor)
    assert memory.any_held()
    assert memory.can_rescue([0])
    kept = tensor.untyped_storage()
    place = kept.data_ptr(), kept.nbytes()
    del tensor, kept
    assert memory.held() == [0], "also when nobody holds it any more"
    assert memory.rescue([0]) == 0
    assert memory.held() == []
    assert memory.tensors[0].data_ptr() == where != place[0]
    replay(memory, 5)
    assert hand_out(memory)[0].tolist() == [5] * 4


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_left_alone_when_the_recording_goes(change):
    memory = seal(ramps(1))
    (tensor,) = hand_out(memory)
    CHANGES[change](tensor)
    storage = tensor.untyped_storage()
    before = storage.data_ptr(), storage.nbytes(), storage.tolist()[:16]
    assert memory.let_go() == 0
    assert before == (storage.data_ptr(), storage.nbytes(), storage.tolist()[:16])


def test_outputs_that_share_a_block_are_held_and_moved_together():
    def make():
        base = torch.arange(6.0)
        return [base, base.view(2, 3).t(), base[4:], torch.zeros(6)]

    memory = seal(make)
    end = hand_out(memory)[2]
    assert memory.held() == [0]
    assert memory.rescue([0]) == 24
    whole, transposed, _, _ = hand_out(memory)
    assert transposed.stride() == (1, 3)
    whole.fill_(7)
    assert transposed.tolist() == [[7, 7]] * 3, "the new stand-ins share memory again"
    assert (transposed._version, hand_out(memory)[0]._version) == (1, 0)
    assert end.tolist() == [4, 5]


@pytest.mark.parametrize("lazy", ["_conj", "_neg_view"])
def test_lazy_bits_stay(lazy):
    memory = seal(lambda: [getattr(torch, lazy)(torch.tensor([1 + 2j, 3 - 1j]))])
    for _ in range(2):
        (tensor,) = hand_out(memory)
        expected = (1 - 2j) if lazy == "_conj" else (-1 - 2j)
        assert (tensor.is_conj(), tensor.is_neg()) == (lazy == "_conj", lazy == "_neg_view")
        assert tensor[0].item() == expected
        assert memory.rescue(memory.held()) == 16
        assert tensor[0].item() == expected
        torch.empty(0, dtype=torch.complex64).set_(
            torch_private.storage_at(memory.addresses()[0], 16, tensor.device)
        ).copy_(torch.tensor([1 + 2j, 3 - 1j]))


@pytest.mark.parametrize("inference", [False, True])
def test_empty_outputs_are_no_memory(inference):
    memory = seal(lambda: [torch.empty(0, 3), torch.zeros(2)])
    with torch.inference_mode(inference):
        empty, tensor = hand_out(memory)
    assert empty.is_inference() is tensor.is_inference() is inference
    assert empty.shape == (0, 3)
    del tensor
    assert not memory.any_held()
    assert len(memory.addresses()) == 1
    assert memory.rescue([]) == 0
    with torch.inference_mode(inference):
        empty.resize_(4, 3)
        assert hand_out(memory)[0].untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("uses", "held", "expected"),
    [
        ([INTERNAL], [0], False),
        ([SHOWN, INTERNAL], [0, 1], False),
        ([BOTH, INTERNAL], [0], True),
        ([BOTH, SHOWN], [0], True),
    ],
)
def test_what_may_move(uses, held, expected):
    memory = seal(ramps(len(uses)), *uses)
    kept = [t for n, t in enumerate(hand_out(memory)) if n in held]
    assert memory.can_rescue(held) is expected
    del kept


def test_an_output_that_the_backward_reads_stays_while_the_backward_is_to_come():
    memory = seal(ramps(3), BOTH, SHOWN, INTERNAL)
    both, shown, internal = hand_out(memory)
    assert not memory.can_rescue([0])
    assert memory.can_rescue([1]), "the user's alone"
    del internal
    assert memory.can_rescue([0])
    assert len([both, shown]) == 2


# ---- who owns it


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


# ---- what a replay would overwrite
