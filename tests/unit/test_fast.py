"""Keys, holders and what is no plain tensor."""

import random
import sys
from array import array
from collections import deque
from types import SimpleNamespace

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
    return storages, fast.watched(storages)


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_the_addresses(seed):
    args = tensors(seed)
    positions = tuple(random.Random(seed).sample(range(len(args)), 20))
    key = fast.static_key(args, positions)
    assert array("q", key).tolist() == [args[i].data_ptr() for i in positions]
    assert fast.static_key(args, ()) == b""


def test_keys_tell_offsets_in_one_storage_apart():
    base = torch.zeros(8)
    keys = {fast.static_key([base[i:]], (0,)) for i in range(8)}
    assert len(keys) == 8


def test_keys_of_what_is_no_tensor_or_not_there_are_refused():
    with pytest.raises(TypeError):
        fast.static_key([None], (0,))
    with pytest.raises(IndexError):
        fast.static_key([torch.zeros(1)], (1,))


def test_geometry():
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(()), torch.zeros(4)[::2]]
    values = [*tensors, None, 3]
    keys = {}
    for positions in ((0,), (1,), (2,), (3,), (4,), (0, 1), (2, 4), (5, 0), ()):
        key = fast.geometry(values, positions)
        assert key == fast.geometry(tuple(values), positions)
        keys[key] = positions
    assert len(keys) == 9
    assert array("q", fast.geometry(values, (1, 4, 2))).tolist() == [2, 2, 3, 1, 2, -1, 0]
    with pytest.raises(IndexError):
        fast.geometry(values, (6,))


def test_note_written():
    with torch.inference_mode():
        inference = torch.zeros(2)
    tensors = [torch.zeros(2), inference, torch.zeros(2, requires_grad=True)]
    fast.note_written(tensors)
    fast.note_written(tensors[:1])
    assert [t._version for t in (tensors[0], tensors[2])] == [2, 1]


def test_contents_tells_what_containers_have_and_where_tensors_lie():
    tensor, key = torch.zeros(4), torch.nn.Parameter(torch.zeros(2))
    roots = [{key: {"a": tensor, "b": (1.5, [None])}}, [tensor[1:]], torch.empty(0).to_sparse()]
    before = fast.contents(roots, ())
    assert [x for x in before[0] if type(x) is str] == ["a", "b"]
    assert sum(x is tensor for x in before[0]) == 1
    assert array("q", before[1]).tolist() == [tensor.data_ptr(), roots[1][0].data_ptr(), 0]
    assert fast.contents([*roots], before) is before
    tensor.data = tensor.data.clone()
    moved = fast.contents(roots, before)
    assert moved[0] is before[0]
    assert moved[1] != before[1]
    for change in (
        lambda: roots[0][key].update(c=1),
        lambda: roots[0][key]["b"][1].append(2),
        lambda: roots[0][key].update(a=torch.zeros(4)),
        lambda: roots[1].clear(),
    ):
        change()
        now = fast.contents(roots, moved)
        assert now[0] is not moved[0]
        moved = now
    roots[1].append(roots)
    with pytest.raises(RecursionError):
        fast.contents(roots, moved)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_first_watched_knows_hooks_that_were_removed(register):
    leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]
    assert fast.first_watched(leaves) == -1
    handles = [getattr(leaves[1], register)(lambda _: None) for _ in range(2)]
    assert fast.first_watched(leaves) == 1
    handles[0].remove()
    assert fast.first_watched(leaves) == 1
    handles[1].remove()
    assert fast.first_watched(leaves) == -1
    leaves[2].grad = torch.ones(2)
    assert fast.first_watched(leaves) == 2


def test_a_holder_of_any_storage_is_noticed():
    owned = [torch.zeros(2) for _ in range(10)]
    known = watch(owned)
    any_held, held = fast.any_held, fast.held
    assert any_held(*known) is False
    for number, tensor in enumerate(owned):
        for hold in (lambda t: t[1:], torch.Tensor.untyped_storage):
            holder = hold(tensor)
            assert any_held(*known) is True
            assert held(*known) == [number]
            del holder
            assert held(*known) == []
    assert any_held(*known) is False
    assert any_held((), b"") is False
    for function in any_held, held:
        with pytest.raises(ValueError, match=r"argument|as many"):
            function(known[0], known[1][:-24])


def test_holders_of_certain_storages_are_noticed():
    owned = {number: [torch.zeros(2) for _ in range(3)] for number in (3, 5, 8)}
    memories = {number: SimpleNamespace(watch=watch(each)) for number, each in owned.items()}
    entries = [(number, memory, "whatever") for number, memory in memories.items()]
    any_held_among = fast.any_held_among

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


def test_transforms_are_noticed():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(fast.in_transform())
            return gradient * 2

    def note(x):
        seen.append(fast.in_transform())
        return x.sum()

    x = torch.zeros(3, requires_grad=True)
    note(x)
    torch.func.vmap(note)(torch.zeros(2, 2))
    torch.func.grad(note)(x)
    torch.autograd.grad(Function.apply(x).sum(), x)
    torch.autograd.grad(Function.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False, True, True, False, True]


def test_a_storage_that_lies_elsewhere_counts_as_held():
    owned = [torch.zeros(2) for _ in range(4)]
    known = watch(owned)
    owned[1].resize_(1000)
    owned[2].untyped_storage().resize_(0)
    assert fast.any_held(*known) is True
    assert fast.held(*known) == [1, 2]


ODD = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "no tensor": lambda: None,
}
TAKEN = {
    ("quantised", "aliases"),
    ("quantised", "views"),
    ("quantised", "static_key"),
    ("sparse", "aliases"),
    ("sparse rows", "aliases"),
    ("meta", "aliases"),
    ("meta", "copies"),
    ("meta", "views"),
    ("meta", "static_key"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, on quantised and sparse tensors
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["aliases", "copies", "views", "static_key"])
def test_tensors_that_are_not_plain_are_taken_or_refused(kind, name):
    odd = ODD[kind]()
    args = {
        "aliases": ((odd,),),
        "copies": ((odd,),),
        "views": ([odd], ((0, (1,), (1,), 0),)),
        "static_key": ([odd], (0,)),
    }
    try:
        found = getattr(fast, name)(*args[name])
    except (RuntimeError, TypeError):
        assert (kind, name) not in TAKEN
        return
    assert (kind, name) in TAKEN
    for tensor in () if isinstance(found, bytes) else found:
        assert (tensor.layout, tensor.dtype, tensor.device) == (odd.layout, odd.dtype, odd.device)


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_put_assigns(kind):
    into = list("abcd")
    fast.put(into, (3, 1), kind([1, None]))
    assert into == ["a", None, "c", 1]
    with pytest.raises(ValueError, match="as many values as positions"):
        fast.put(into, (0, 1), [1])
    with pytest.raises(IndexError):
        fast.put(into, (4,), [1])


def test_no_reference_is_lost_or_kept():
    tensor, value = torch.zeros(2), object()
    args, specs = [tensor], ((0, (1,), (1,), 0),)
    before = (sys.getrefcount(tensor), sys.getrefcount(value))
    storage = tensor.untyped_storage()._cdata
    held = torch_private.storage_use_count(storage)
    for _ in range(10):
        fast.static_key(args, (0,))
        fast.aliases((tensor,))
        fast.views(args, specs)
        fast.copies((tensor,))
        into = [None]
        fast.put(into, (0,), (value,))
        del into
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert torch_private.storage_use_count(storage) == held
