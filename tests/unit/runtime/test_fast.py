"""The native functions that every recording uses; those of graphed callables and whole steps are tested there."""

import random
import sys
from array import array

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime import fast


def tensors(seed):
    """Tensors of every layout and of many dtypes."""
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    found = []
    for _ in range(40):
        size = [rng.randrange(4) for _ in range(rng.randrange(4))]
        tensor = torch.arange(64).reshape(4, 4, 4).to(rng.choice(dtypes))
        tensor = tensor.as_strided(size, [16, 4, 1][: len(size)], rng.randrange(3))
        if rng.random() < 0.3:
            tensor = tensor.permute(rng.sample(range(len(size)), len(size)))
        if rng.random() < 0.2:
            tensor = tensor[..., None].expand(*tensor.size(), 3)
        found.append(tensor)
    lazy = torch.zeros(2, dtype=torch.complex64).conj()
    return [*found, lazy, torch.nn.Parameter(torch.zeros(3)), torch.tensor(2.5), torch.empty(0)]


# ---- keys


def test_keys_are_the_places_and_the_storages():
    args = tensors(0)
    positions = tuple(random.Random(0).sample(range(len(args)), 20))
    key, storages = fast.static_key(args, positions), fast.storage_key(args, positions)
    empty = [not args[i].numel() for i in positions]
    assert [not number for number in array("q", key)] == empty
    assert array("q", storages).tolist() == [args[i].untyped_storage()._cdata for i in positions]
    assert fast.static_key(args, ()) == b""
    with pytest.raises(TypeError):
        fast.static_key([None], (0,))
    with pytest.raises(IndexError):
        fast.static_key([torch.zeros(1)], (1,))


def test_a_place_is_an_address_and_a_layout():
    x = torch.arange(12.0).view(3, 4)
    other = x[1:], x[:2], x.view(4, 3), x.as_strided((3, 4), (1, 3)), x.view(torch.int32), x.clone()
    keys = [fast.static_key([each], (0,)) for each in (x, *other)]
    assert len({*keys}) == len(keys)
    assert fast.static_key([x.detach().view(12).view(3, 4)], (0,)) == keys[0]


# ---- who holds it


def users(tensor):
    return array("q", fast.watched((tensor.untyped_storage(),)))[2] - 1  # that tuple's


HOLD = {
    "a view": lambda t: t[1:],
    "its storage": torch.Tensor.untyped_storage,
    "the tensor": lambda t: t,
    "a graph": lambda t: (torch.ones(4, requires_grad=True) * t).grad_fn,
}


def test_an_input_is_exclusive_until_somebody_holds_it():
    exclusive = fast.exclusive
    args = [torch.zeros(4), None, torch.ones(4)]
    positions, counts = (0, 2), [users(args[0]), users(args[2])]
    assert exclusive(args, positions, counts) is True
    for name, hold in HOLD.items():
        holder = hold(args[2])
        assert exclusive(args, positions, counts) is False, name
        del holder
        assert exclusive(args, positions, counts) is True, name
    assert exclusive([None], (), ()) is True
    for wrong in ((positions, ()), ((3,), (1,))):
        with pytest.raises(IndexError):
            exclusive(args, *wrong)


# ---- tensors that are made of others


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


def test_aliases_are_detached_and_have_version_counters_of_their_own():
    originals = [*tensors(4), torch.ones(2, requires_grad=True).sin()]
    found = fast.aliases(tuple(originals), range_of(originals))
    for ours, original in zip(found, originals, strict=True):
        assert facts(ours) == facts(original.data)
        if original.numel():
            assert ours.untyped_storage()._cdata == original.untyped_storage()._cdata
            assert ours.data_ptr() == original.data_ptr()
    original = torch.zeros(2, 3)
    first, follower, other = fast.aliases((original, original[1:], original), (0, 0, 2))
    first.add_(1)
    first.t_()
    assert [t._version for t in (original, first, follower, other)] == [0, 2, 2, 0]
    assert original.tolist() == [[1] * 3] * 2
    empty = torch.empty(0, 3)
    for alias in fast.aliases((empty, empty), (0, 1)):
        alias.resize_(2, 3).fill_(1)
        assert (empty.size(), empty.untyped_storage().nbytes()) == ((0, 3), 0)


def range_of(values):
    return tuple(range(len(values)))


@pytest.mark.parametrize("outer", [True, False])
def test_aliases_and_copies_in_inference_mode(outer):
    normal = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
    with torch.inference_mode(outer):
        both = [normal, inference]
        aliases, copies = fast.aliases(both, (0, 1)), both.copy()
        fast.copy_out(copies, (0, 1))
        for found in (aliases, copies):
            assert [t.is_inference() for t in found] == [False, True]
            assert [t.tolist() for t in found] == [[0, 0], [0, 0]]


def check_copies(sources, device="cpu"):
    """Every tensor, two on one storage, and one tensor twice are copied out."""
    shared = torch.arange(6.0, device=device)
    sources = [*sources, shared, shared[2:], shared.view(torch.int32)[:1], shared]
    results = [*sources, None]
    num_bytes = fast.copy_out(results, range_of(sources))
    storages = {t.untyped_storage()._cdata for t in sources}
    assert num_bytes <= sum(t.nbytes + 64 for t in sources)
    for ours, source in zip(results, sources, strict=False):
        assert torch.equal(ours, source)
        for part in (slice(3), slice(4, -2)):  # all but where in its storage it begins
            assert facts(ours)[part] == facts(source.data)[part]
        assert ours.untyped_storage()._cdata not in storages
        assert (ours.device, ours._version) == (source.device, 0)
    first, part, other, twin, nothing = results[-5:]
    assert twin is first
    assert nothing is None
    part.fill_(9)
    assert first.tolist() == [0, 1, 9, 9, 9, 9]
    assert (first._version, other._version) == (1, 1)
    assert shared.tolist() == [0, 1, 2, 3, 4, 5]
    first.resize_(100)
    return results


def test_copies_own_their_memory():
    check_copies(tensors(5))
    assert fast.copy_out([], ()) == 0


@pytest.mark.parametrize(
    ("parts", "num_bytes", "nbytes"),
    [
        (lambda x: [x[3]], 1024, 1024),
        (lambda x: [x[:, -1]], 4 * 64, 3 * 1024 + 64),
        (lambda x: [x[1, 3], x[1, 2:4, 1:], x[1, 2]], 128, 128),
        (lambda x: [x[0, :1].expand(4, 16)], 64, 64),
        (lambda x: [x[2, 0], x[2, 0, :0]], 64, 64),
        (lambda x: [x[2:2]], 0, 0),
    ],
)
def test_copies_span_no_more_than_what_is_copied(parts, num_bytes, nbytes):
    """Operators compute the same of a copy as of the original: addresses and strides are alike."""
    sources = parts(torch.arange(1024.0).view(4, 16, 16))
    results = sources.copy()
    assert fast.copy_out(results, range_of(sources)) == num_bytes
    assert {t.untyped_storage().nbytes() for t in results} == {nbytes}
    assert len({t.untyped_storage()._cdata for t in results}) == 1
    for ours, source in zip(results, sources, strict=True):
        assert torch.equal(ours, source)
        assert ours.stride() == source.stride()
        assert not ours.numel() or (ours.data_ptr() - source.data_ptr()) % 64 == 0


@pytest.mark.gpu
def test_copies_on_cuda():
    device = torch.device("cuda", 0)
    sources = tuple(torch.randn(3, 5, device=device)[:, :n].t() for n in range(1, 6))
    before = torch.cuda.memory_allocated(device)
    found = check_copies(sources, device)
    assert torch.cuda.memory_allocated(device) > before
    del found
    assert torch.cuda.memory_allocated(device) == before


def test_swapped_storages_keep_their_holders():
    first, second = [torch.zeros(4), torch.ones(2)], [torch.full((4,), 5.0), torch.full((2,), 6.0)]
    where = [t.data_ptr() for t in first + second]
    view, versions = first[0][1:], [t._version for t in first + second]
    fast.swap_storages(first, second)
    assert [t.data_ptr() for t in second + first] == where
    assert [t.tolist() for t in first + second] == [[5] * 4, [6] * 2, [0] * 4, [1] * 2]
    assert [t._version for t in first + second] == versions
    first[0].fill_(7)
    assert view.tolist() == [7] * 3
    for other in (torch.zeros(3), torch.empty(4, device="meta")):
        with pytest.raises(RuntimeError, match="storages of one size on one device expected"):
            fast.swap_storages(first[:1], [other])


def test_swapped_memory_is_freed_with_its_new_holder():
    memory = array("f", [1, 2, 3])
    owned, borrowed = torch.zeros(3), torch.frombuffer(memory, dtype=torch.float32)
    before = sys.getrefcount(memory)
    fast.swap_storages([owned], [borrowed])
    del borrowed
    memory[0] = 9
    assert owned.tolist() == [9, 2, 3]
    assert sys.getrefcount(memory) == before
    del owned
    assert sys.getrefcount(memory) == before - 1


def test_no_reference_is_lost_or_kept():
    tensor, value = torch.zeros(2), object()
    args, specs = [tensor], ((0, tensor[:1], 0),)
    before = (sys.getrefcount(tensor), sys.getrefcount(value))
    storage = tensor.untyped_storage()._cdata
    held = torch_private.storage_use_count(storage)
    for _ in range(10):
        fast.static_key(args, (0,))
        fast.aliases((tensor,), (0,))
        fast.views(args, specs)
        fast.copy_out([tensor, tensor], (0, 1))
        fast.unchanged([{"a": value}], ["a"], [value], [], b"")
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert torch_private.storage_use_count(storage) == held
