"""Who holds an output, how what is held moves, and who owns the memory under it."""

import pytest
import torch

from cgpass import torch_private
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
def test_every_holder_counts(kind):
    memory = seal(ramps(1))
    assert not memory.any_held()
    holder = HOLDERS[kind][0](hand_out(memory)[0])
    assert memory.any_held()
    assert memory.held() == [0]
    del holder
    assert not memory.any_held()
    assert memory.held() == []


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_rescue_moves_the_holder_and_not_the_recording(kind):
    hold, read = HOLDERS[kind]
    memory = seal(ramps(1))
    where = memory.addresses()
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


def test_empty_outputs_are_no_memory():
    memory = seal(lambda: [torch.empty(0, 3), torch.zeros(2)])
    empty, tensor = hand_out(memory)
    assert empty.shape == (0, 3)
    del tensor
    assert not memory.any_held()
    assert len(memory.addresses()) == 1
    assert memory.rescue([]) == 0


@pytest.mark.parametrize(
    ("uses", "held", "expected"),
    [
        ([SHOWN], [0], True),
        ([INTERNAL], [0], False),
        ([BOTH], [0], True),
        ([SHOWN, INTERNAL], [0], True),
        ([SHOWN, INTERNAL], [0, 1], False),
        ([BOTH, INTERNAL], [0], True),
        ([BOTH, SHOWN], [0], True),
    ],
)
def test_what_may_move(uses, held, expected):
    memory = seal(ramps(len(uses)), *uses)
    kept = [t for n, t in enumerate(hand_out(memory)) if n in held]
    assert memory.can_rescue(held) is expected
    assert len(kept) == len(held)


def test_an_output_that_the_backward_reads_stays_while_the_backward_is_to_come():
    memory = seal(ramps(3), BOTH, SHOWN, INTERNAL)
    both, shown, internal = hand_out(memory)
    assert not memory.can_rescue([0])
    assert memory.can_rescue([1]), "the user's alone"
    del internal
    assert memory.can_rescue([0])
    assert len([both, shown]) == 2
