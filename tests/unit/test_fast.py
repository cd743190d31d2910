"""The C++ functions do what the Python versions of them do."""

import random
import sys
from array import array
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from cgpass import _torch
from cgpass.runtime import fast, fast_python
from cgpass.runtime.placeholders import overlaps_itself

PYTHON = fast.PYTHON


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
            tensor = tensor.clone()
        if rng.random() < 0.3:
            tensor = tensor.permute(rng.sample(range(len(size)), len(size)))
        if rng.random() < 0.2:
            tensor = tensor[..., None].expand(*tensor.size(), 3)
        found.append(tensor)
    return [*found, torch.nn.Parameter(torch.zeros(3)), torch.tensor(2.5), torch.empty(0)]


def copies(functions, *sources):
    """Copies of tensors of any dtypes."""
    return [functions["copies"]((t,), ((tuple(t.size()), t.stride()),))[0] for t in sources]


def watch(owned):
    """What `any_held` takes for the storages of tensors that nobody else holds now."""
    storages = tuple(t.untyped_storage() for t in owned)
    return storages, fast_python.watched(storages, fast_python.count_users(storages))


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


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_the_addresses(functions, seed):
    args = tensors(seed)
    positions = tuple(random.Random(seed).sample(range(len(args)), 20))
    key = functions["static_key"](args, positions)
    assert array("q", key).tolist() == [args[i].data_ptr() for i in positions]
    assert key == PYTHON["static_key"](args, positions)
    assert functions["static_key"](args, ()) == b""


def test_keys_tell_offsets_in_one_storage_apart(functions):
    base = torch.zeros(8)
    keys = {functions["static_key"]([base[i:]], (0,)) for i in range(8)}
    assert len(keys) == 8


def test_keys_of_what_is_no_tensor_or_not_there_are_refused(functions):
    with pytest.raises(TypeError):
        functions["static_key"]([None], (0,))
    with pytest.raises(IndexError):
        functions["static_key"]([torch.zeros(1)], (1,))


def test_geometry(functions):
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(()), torch.zeros(4)[::2]]
    values = [*tensors, None, 3]
    keys = {}
    for positions in ((0,), (1,), (2,), (3,), (4,), (0, 1), (2, 4), (5, 0), ()):
        key = functions["geometry"](values, positions)
        assert (
            key
            == PYTHON["geometry"](values, positions)
            == functions["geometry"](tuple(values), positions)
        )
        keys[key] = positions
    assert len(keys) == 9
    assert array("q", functions["geometry"](values, (1, 4, 2))).tolist() == [2, 2, 3, 1, 2, -1, 0]
    with pytest.raises(IndexError):
        functions["geometry"](values, (6,))


def test_versions(functions):
    with torch.inference_mode():
        frozen = torch.zeros(1)
    args = [torch.zeros(1), 3, torch.zeros(1), frozen]
    before = functions["versions"](args, (0, 2, 3))
    assert before == PYTHON["versions"](args, (0, 2, 3)) == array("q", [0, 0, 0]).tobytes()
    args[2].detach().add_(1)
    assert functions["versions"](args, (0, 2, 3)) == array("q", [0, 1, 0]).tobytes()
    assert functions["versions"](args, ()) == b""


def test_a_holder_of_any_storage_is_noticed(functions):
    owned = [torch.zeros(2) for _ in range(10)]
    watched = watch(owned)
    any_held, held = functions["any_held"], functions["held"]
    assert any_held(*watched) is False
    for number, tensor in enumerate(owned):
        for hold in (lambda t: t[1:], torch.Tensor.untyped_storage):
            holder = hold(tensor)
            assert any_held(*watched) is True
            assert held(*watched) == [number]
            del holder
            assert held(*watched) == []
    assert any_held(*watched) is False
    assert any_held((), b"") is False
    for function in any_held, held:
        with pytest.raises(ValueError, match=r"argument|as many"):
            function(watched[0], watched[1][:-24])


def test_holders_of_certain_storages_are_noticed(functions):
    owned = {number: [torch.zeros(2) for _ in range(3)] for number in (3, 5, 8)}
    memories = {number: SimpleNamespace(watch=watch(each)) for number, each in owned.items()}
    entries = [(number, memory, "whatever") for number, memory in memories.items()]
    any_held_among = functions["any_held_among"]

    def asked(among):
        found = any_held_among(entries, among)
        assert found is any_held_among(tuple(entries), among)
        return found

    among = {3: (0, 2), 8: (1,), 9: (0,)}
    assert asked(among) is False
    for number, tensors in owned.items():
        for k, tensor in enumerate(tensors):
            holder = tensor[1:]
            assert asked(among) is (k in among.get(number, ()))
            assert asked({number: ()}) is False
            assert asked({number: (k,)}) is True
            del holder
    assert asked(among) is False
    assert any_held_among([], among) is any_held_among(entries, {}) is False
    owned[8][1].resize_(1000)
    assert asked(among) is True
    counts = memories[8].watch[1]
    memories[8].watch = (memories[8].watch[0], counts[:-24])
    with pytest.raises(ValueError, match=r"argument|as many"):
        any_held_among(entries, {8: (0,)})


def test_transforms_are_noticed(functions):
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(functions["in_transform"]())
            return gradient * 2

    def note(x):
        seen.append(functions["in_transform"]())
        return x.sum()

    x = torch.zeros(3, requires_grad=True)
    note(x)
    torch.func.vmap(note)(torch.zeros(2, 2))
    torch.func.grad(note)(x)
    torch.autograd.grad(Function.apply(x).sum(), x)
    torch.autograd.grad(Function.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False, True, True, False, True]


def test_a_storage_that_lies_elsewhere_counts_as_held(functions):
    owned = [torch.zeros(2) for _ in range(4)]
    watched = watch(owned)
    owned[1].resize_(1000)
    owned[2].untyped_storage().resize_(0)
    assert functions["any_held"](*watched) is True
    assert functions["held"](*watched) == [1, 2]


def test_a_stand_in_lies_where_it_is_told_until_it_is_resized(functions):
    if functions is PYTHON and _torch.swap_data_ptr is None:
        pytest.skip("this torch swaps with the compiled functions only")
    owner = torch.arange(6.0)
    bytes_ = functions["stand_in"](owner.data_ptr(), 24, torch.empty(0))
    floats = bytes_.view(torch.float32)
    expected = owner.view(torch.uint8)
    assert facts(bytes_) == facts(expected.clone())
    assert bytes_.data_ptr() == owner.data_ptr()
    floats[0] = 7
    assert owner[0] == 7
    if functions is PYTHON:  # torch's own exchange takes along that the address came from outside
        with pytest.raises(RuntimeError, match="not resizable"):
            bytes_.resize_(48)
        return
    bytes_.resize_(48)
    floats[0] = 8
    assert floats.tolist() == [8, 1, 2, 3, 4, 5]
    assert owner[0] == 7
    assert bytes_.data_ptr() != owner.data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_aliases_are_detached(functions, seed):
    originals = tensors(seed)
    originals.append(torch.ones(2, requires_grad=True).sin())
    originals.append(torch.zeros(2, dtype=torch.complex64).conj())
    found = functions["aliases"](tuple(originals))
    for ours, original in zip(found, originals, strict=True):
        assert facts(ours) == facts(original.data)
        assert ours is not original
        assert ours.untyped_storage()._cdata == original.untyped_storage()._cdata
        assert ours.data_ptr() == original.data_ptr()


def test_aliases_have_version_counters_of_their_own(functions):
    original = torch.zeros(2)
    original.add_(1)
    first, second = functions["aliases"]((original, original))
    assert (first._version, second._version) == (0, 0)
    first.add_(1)
    assert second.tolist() == [2, 2]
    assert (original._version, first._version, second._version) == (1, 1, 0)


def test_an_alias_that_backward_needs_is_checked_for_what_is_done_to_it_alone(functions):
    original = torch.ones(2)
    first, second = functions["aliases"]((original, original))
    losses = [(alias.requires_grad_() * alias).sum() for alias in (first, second)]
    with torch.no_grad():
        first.add_(1)
    losses[1].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


def test_aliases_may_change_their_own_layout(functions):
    original = torch.zeros(2, 3)
    (alias,) = functions["aliases"]((original,))
    alias.t_()
    assert (alias.size(), original.size()) == ((3, 2), (2, 3))
    alias.set_(torch.ones(4))
    assert original.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("outer", [True, False])
def test_aliases_and_copies_in_inference_mode(functions, outer):
    normal = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
    with torch.inference_mode(outer):
        pairs = [
            (functions["aliases"]((normal, inference)), PYTHON["aliases"]((normal, inference))),
            (copies(functions, normal, inference), copies(PYTHON, normal, inference)),
        ]
        for found, expected in pairs:
            assert [t.is_inference() for t in found] == [t.is_inference() for t in expected]
            assert [t.tolist() for t in found] == [[0, 0], [0, 0]]


def test_views_lie_in_the_inputs_storage(functions):
    base = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    specs = ((1, (3, 2), (1, 3), 0), (0, (2, 2), (4, 1), 1), (0, (), (), 3), (0, (0, 2), (2, 1), 0))
    with torch.no_grad():
        found = functions["views"]([base[2:], weight], specs)
        expected = [weight.t(), base.as_strided((2, 2), (4, 1), 3), base[5], base[:0].view(0, 2)]
    for ours, value in zip(found, expected, strict=True):
        assert torch.equal(ours, value)
        assert ours.stride() == value.stride()
        assert (ours._is_view(), ours.requires_grad) == (False, False)
    found[1].add_(1)
    assert base._version == 1
    assert base[3].item() == 4
    with pytest.raises(RuntimeError, match=r"out of the bounds|out of bounds"):
        functions["views"]([base], ((0, (13,), (1,), 0),))


@pytest.mark.parametrize("seed", range(3))
def test_copies_own_their_memory(functions, seed):
    sources = [t.detach() for t in tensors(seed) if not overlaps_itself(t)]
    assert len(sources) > 10
    by_dtype = {}
    for source in sources:
        by_dtype.setdefault(source.dtype, []).append(source)
    for members in by_dtype.values():
        layouts = tuple((tuple(t.size()), t.stride()) for t in members)
        found = functions["copies"](tuple(members), layouts)
        expected = PYTHON["copies"](tuple(members), layouts)
        for ours, source, theirs in zip(found, members, expected, strict=True):
            assert torch.equal(ours, source)
            assert facts(ours) == facts(theirs)
            assert ours.untyped_storage()._cdata != source.untyped_storage()._cdata
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert functions["copies"]((), ()) == []


@pytest.mark.gpu
def test_copies_on_cuda(functions):
    device = torch.device("cuda", 0)
    sources = tuple(torch.randn(3, 5, device=device)[:, :n].t() for n in range(1, 6))
    layouts = tuple((tuple(t.size()), t.stride()) for t in sources)
    before = torch.cuda.memory_allocated(device)
    found = functions["copies"](sources, layouts)
    assert torch.cuda.memory_allocated(device) > before
    assert [facts(t) for t in found] == [facts(t) for t in PYTHON["copies"](sources, layouts)]
    assert all(map(torch.equal, found, sources))
    assert {t.device for t in found} == {device}
    assert functions["static_key"](list(found), (2,)) == array("q", [found[2].data_ptr()]).tobytes()
    del found
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.multigpu(2)
def test_copies_on_another_device_than_the_current_one(functions):
    with torch.cuda.device(0):
        (copy,) = copies(functions, torch.ones(3, device="cuda:1"))
    assert copy.device == torch.device("cuda", 1)
    assert copy.tolist() == [1, 1, 1]


def test_copies_know_no_autograd_and_may_grow(functions):
    source = torch.ones(2, requires_grad=True)
    (copy,) = copies(functions, source)
    assert not copy.requires_grad
    copy.resize_(5)
    assert copy.requires_grad_().sum().backward() is None


ODD = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "no tensor": lambda: None,
}


@pytest.mark.filterwarnings("ignore")  # torch's own, on quantised and sparse tensors
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["aliases", "copies", "views", "static_key"])
def test_tensors_that_are_not_plain_are_taken_or_refused_alike(compiled, kind, name):
    odd = ODD[kind]()
    args = {
        "aliases": ((odd,),),
        "copies": ((odd,), (((3,), (1,)),)),
        "views": ([odd], ((0, (1,), (1,), 0),)),
        "static_key": ([odd], (0,)),
    }

    def outcome(functions):
        try:
            found = functions[name](*args[name])
        except (RuntimeError, TypeError, AttributeError):
            return "refused"
        return found if isinstance(found, bytes) else [(t.layout, t.dtype, t.device) for t in found]

    assert outcome(compiled) == outcome(PYTHON)


def test_copies_of_memory_that_no_allocator_owns(functions):
    memory = array("f", [1, 2, 3])
    source = torch.frombuffer(memory, dtype=torch.float32)
    (copy,) = copies(functions, source)
    memory[0] = 5
    assert (copy.tolist(), source.tolist()) == ([1, 2, 3], [5, 2, 3])


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_put_assigns(functions, kind):
    into = list("abcd")
    functions["put"](into, (3, 1), kind([1, None]))
    assert into == ["a", None, "c", 1]
    with pytest.raises(ValueError, match="as many values as positions"):
        functions["put"](into, (0, 1), [1])
    with pytest.raises(IndexError):
        functions["put"](into, (4,), [1])


def test_no_reference_is_lost_or_kept(functions):
    tensor, value = torch.zeros(2), object()
    args, specs = [tensor], ((0, (1,), (1,), 0),)
    before = (sys.getrefcount(tensor), sys.getrefcount(value))
    storage = tensor.untyped_storage()._cdata
    held = _torch.storage_use_count(storage)
    for _ in range(10):
        functions["static_key"](args, (0,))
        functions["aliases"]((tensor,))
        functions["views"](args, specs)
        functions["copies"]((tensor,), (((2,), (1,)),))
        into = [None]
        functions["put"](into, (0,), (value,))
        del into
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert _torch.storage_use_count(storage) == held


def test_one_version_goes_on_with_what_the_other_made(compiled, monkeypatch):
    for name, function in PYTHON.items():
        monkeypatch.setattr(fast, name, function)
    owned = [torch.zeros(2), torch.zeros(3)]
    watched = watch(owned)
    key = fast.static_key(owned, (0, 1))
    fast.install(compiled)
    assert not fast.any_held(*watched)
    assert fast.static_key(owned, (0, 1)) == key
    alias = owned[1].detach()
    assert fast.any_held(*watched)
    del alias
    assert fast.is_compiled()
