"""Tensors that are made of others: stand-ins, aliases, views and copies."""

from array import array

import pytest
import torch

from cgpass.runtime import fast
from cgpass.runtime.inputs import overlaps_itself
from tests.unit.test_fast import tensors


def copies(*sources):
    """Copies of tensors of any dtypes."""
    return [fast.copies((t,))[0] for t in sources]


def facts(tensor):
    return (
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        tensor.is_inference(),
        tensor.is_conj(),
        tensor._version,
        type(tensor),
    )


def test_a_stand_in_lies_where_it_is_told_until_it_is_resized():
    owner = torch.arange(6.0)
    bytes_ = fast.stand_in(owner.data_ptr(), 24, torch.empty(0))
    floats = bytes_.view(torch.float32)
    expected = owner.view(torch.uint8)
    assert facts(bytes_) == facts(expected.clone())
    assert bytes_.data_ptr() == owner.data_ptr()
    floats[0] = 7
    assert owner[0] == 7
    bytes_.resize_(48)
    floats[0] = 8
    assert floats.tolist() == [8, 1, 2, 3, 4, 5]
    assert owner[0] == 7
    assert bytes_.data_ptr() != owner.data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_aliases_are_detached(seed):
    originals = tensors(seed)
    originals.append(torch.ones(2, requires_grad=True).sin())
    originals.append(torch.zeros(2, dtype=torch.complex64).conj())
    found = fast.aliases(tuple(originals))
    for ours, original in zip(found, originals, strict=True):
        assert facts(ours) == facts(original.data)
        assert ours is not original
        assert ours.untyped_storage()._cdata == original.untyped_storage()._cdata
        assert ours.data_ptr() == original.data_ptr()


def test_aliases_have_version_counters_of_their_own():
    original = torch.zeros(2)
    original.add_(1)
    first, second = fast.aliases((original, original))
    assert (first._version, second._version) == (0, 0)
    first.add_(1)
    assert second.tolist() == [2, 2]
    assert (original._version, first._version, second._version) == (1, 1, 0)


def test_an_alias_that_backward_needs_is_checked_for_what_is_done_to_it_alone():
    original = torch.ones(2)
    first, second = fast.aliases((original, original))
    losses = [(alias.requires_grad_() * alias).sum() for alias in (first, second)]
    with torch.no_grad():
        first.add_(1)
    losses[1].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


def test_aliases_may_change_their_own_layout():
    original = torch.zeros(2, 3)
    (alias,) = fast.aliases((original,))
    alias.t_()
    assert (alias.size(), original.size()) == ((3, 2), (2, 3))
    alias.set_(torch.ones(4))
    assert original.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("outer", [True, False])
def test_aliases_and_copies_in_inference_mode(outer):
    normal = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
    with torch.inference_mode(outer):
        pairs = [
            (fast.aliases((normal, inference)), [normal.data, inference.data]),
            (copies(normal, inference), [normal.clone(), inference.clone()]),
        ]
        for found, expected in pairs:
            assert [t.is_inference() for t in found] == [t.is_inference() for t in expected]
            assert [t.tolist() for t in found] == [[0, 0], [0, 0]]


def test_views_lie_in_the_inputs_storage():
    base = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    specs = ((1, (3, 2), (1, 3), 0), (0, (2, 2), (4, 1), 1), (0, (), (), 3), (0, (0, 2), (2, 1), 0))
    with torch.no_grad():
        found = fast.views([base[2:], weight], specs)
        expected = [weight.t(), base.as_strided((2, 2), (4, 1), 3), base[5], base[:0].view(0, 2)]
    for ours, value in zip(found, expected, strict=True):
        assert torch.equal(ours, value)
        assert ours.stride() == value.stride()
        assert (ours._is_view(), ours.requires_grad) == (False, False)
    found[1].add_(1)
    assert base._version == 1
    assert base[3].item() == 4
    with pytest.raises(RuntimeError, match=r"out of the bounds|out of bounds"):
        fast.views([base], ((0, (13,), (1,), 0),))


@pytest.mark.parametrize("seed", range(3))
def test_copies_own_their_memory(seed):
    sources = [t.detach() for t in tensors(seed) if not overlaps_itself(t)]
    assert len(sources) > 10
    by_dtype = {}
    for source in sources:
        by_dtype.setdefault(source.dtype, []).append(source)
    for members in by_dtype.values():
        found = fast.copies(tuple(members))
        expected = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) for t in members]
        for ours, source, theirs in zip(found, members, expected, strict=True):
            assert torch.equal(ours, source)
            assert facts(ours)[:-2] == facts(theirs)[:-2]
            assert ours.untyped_storage()._cdata != source.untyped_storage()._cdata
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert fast.copies(()) == []


@pytest.mark.gpu
def test_copies_on_cuda():
    device = torch.device("cuda", 0)
    sources = tuple(torch.randn(3, 5, device=device)[:, :n].t() for n in range(1, 6))
    before = torch.cuda.memory_allocated(device)
    found = fast.copies(sources)
    assert torch.cuda.memory_allocated(device) > before
    assert [t.stride() for t in found] == [t.stride() for t in sources]
    assert all(map(torch.equal, found, sources))
    assert {t.device for t in found} == {device}
    assert fast.static_key(list(found), (2,)) == array("q", [found[2].data_ptr()]).tobytes()
    del found
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.multigpu(2)
def test_copies_on_another_device_than_the_current_one():
    with torch.cuda.device(0):
        (copy,) = copies(torch.ones(3, device="cuda:1"))
    assert copy.device == torch.device("cuda", 1)
    assert copy.tolist() == [1, 1, 1]


def test_copies_know_no_autograd_and_may_grow():
    source = torch.ones(2, requires_grad=True)
    (copy,) = copies(source)
    assert not copy.requires_grad
    copy.resize_(5)
    assert copy.requires_grad_().sum().backward() is None


def test_copies_of_memory_that_no_allocator_owns():
    memory = array("f", [1, 2, 3])
    source = torch.frombuffer(memory, dtype=torch.float32)
    (copy,) = copies(source)
    memory[0] = 5
    assert (copy.tolist(), source.tolist()) == ([1, 2, 3], [5, 2, 3])
