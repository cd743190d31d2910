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


def watch(owned):
    """What `any_held` takes for the storages of tensors that nobody else holds now."""
    storages = tuple(t.untyped_storage() for t in owned)
    return storages, fast_python.watched(storages, fast_python.count_users(storages))


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
