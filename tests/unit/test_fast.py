"""The native functions: keys, who holds what, tensors that are made of others."""

import random
import sys
from array import array
from collections import OrderedDict
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
            tensor = tensor.permute(rng.sample(range(len(size)), len(size)))
        if rng.random() < 0.2:
            tensor = tensor[..., None].expand(*tensor.size(), 3)
        found.append(tensor)
    lazy = torch.zeros(2, dtype=torch.complex64).conj()
    return [*found, lazy, torch.nn.Parameter(torch.zeros(3)), torch.tensor(2.5), torch.empty(0)]


# ---- keys


def test_keys_are_the_addresses_and_the_storages():
    args = tensors(0)
    positions = tuple(random.Random(0).sample(range(len(args)), 20))
    key, storages = fast.static_key(args, positions), fast.storage_key(args, positions)
    assert array("q", key).tolist() == [args[i].data_ptr() for i in positions]
    assert array("q", storages).tolist() == [args[i].untyped_storage()._cdata for i in positions]
    assert fast.static_key(args, ()) == b""
    with pytest.raises(TypeError):
        fast.static_key([None], (0,))
    with pytest.raises(IndexError):
        fast.static_key([torch.zeros(1)], (1,))


def test_geometry():
    values = [*tensors(1), None, 3]
    expected = []
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        expected += [value.dim(), *value.size(), *value.stride()] if is_tensor else [-1]
    assert array("q", fast.geometry(values, tuple(range(len(values))))).tolist() == expected
    with pytest.raises(IndexError):
        fast.geometry(values, (len(values),))


def read_layouts(key):
    """The integers of each tensor in what `fast.layouts` returned."""
    numbers, found = array("q", key).tolist(), []
    while numbers:
        end = 5 + 2 * numbers[0]
        found.append(tuple(numbers[:end]))
        del numbers[:end]
    return found


def test_layouts_tell_what_a_graph_has_in_it():
    args = tensors(2)
    args += [args[3], args[7].detach()]
    found = read_layouts(fast.layouts(args))
    assert len(found) == len(args)
    for numbers, tensor in zip(found, args, strict=True):
        first = next(i for i, t in enumerate(args) if t is tensor)
        assert numbers[1:3] == (tensor.data_ptr(), first)
        assert numbers[5:] == (*tensor.size(), *tensor.stride())
    assert len({fast.layouts([args[0].to(dtype)])[24:32] for dtype in (torch.int8, bool)}) == 2
    base = torch.zeros(2, dtype=torch.complex64)
    assert fast.layouts([base]) != fast.layouts([base.conj()])
    with pytest.raises(TypeError):
        fast.layouts([None])
    assert fast.requiring_grad(args) == bytes([t.requires_grad for t in args])


def test_members_are_compared_by_identity():
    values = [torch.zeros(2), None, "text", ..., 3]

    class Scripted:
        def __getitem__(self, key):
            return {"e": values[4]}[key]

    holder = dict(zip("abc", values, strict=False))
    mappings, keys = [holder, holder, OrderedDict(holder), holder, Scripted()], list("abcde")
    given = (mappings, keys, values, [holder], array("q", [3]).tobytes())
    unchanged = fast.unchanged
    assert unchanged(*given) is True
    for change in ({"a": torch.zeros(2)}, {"b": 0}, {"other": 1}):
        before = dict(holder)
        holder.update(change)
        assert unchanged(*given) is False
        holder.clear()
        holder.update(before)
        assert unchanged(*given) is True
    assert not unchanged([Scripted()], ["d"], [None], [], b"")
    assert unchanged([Scripted()], ["d"], [...], [], b"")
    with pytest.raises(ValueError, match="as many"):
        unchanged(*given[:4], b"")
    assert fast.members(mappings[::2], ["b", "a", "e"]) == [None, values[0], 3]
    with pytest.raises(KeyError, match="'d'"):
        fast.members(mappings[:1], ["d"])


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


def test_fits():
    given = tensors(3)
    flags = bytes(len(given))
    assert not fast.fits(given, given, flags)  # one is a parameter
    with torch.no_grad():
        assert fast.fits(given, given, flags)
    assert fast.fits(given, given, bytes([t.requires_grad for t in given]))
    x = torch.zeros(2, 3)
    for other in (x.T, x.double(), x.to("meta"), x.to_sparse(), None, x.clone().requires_grad_()):
        assert not fast.fits([other], [x], b"\0")
    assert not fast.fits([x, x], [x], b"\0")
    with pytest.raises(ValueError, match="as many"):
        fast.fits([x], [x], b"")


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


# ---- who holds it


def watch(owned):
    """What `any_held` takes for the storages of tensors that nobody else holds now."""
    storages = tuple(t.untyped_storage() for t in owned)
    return storages, fast.watched(storages)


def users(tensor):
    return array("q", fast.watched((tensor.untyped_storage(),)))[2] - 1  # that tuple's


HOLD = {
    "a view": lambda t: t[1:],
    "an alias": lambda t: t.detach(),
    "its storage": torch.Tensor.untyped_storage,
    "its storage in another tensor": lambda t: torch.empty(0).set_(t.untyped_storage()),
}
HOLD_IT = {
    "the tensor": lambda t: t,
    "a list": lambda t: [t],
    "a graph": lambda t: (torch.ones(4, requires_grad=True) * t).grad_fn,
}
MOVE = {
    "another place": lambda t: t.resize_(1000),
    "none": lambda t: t.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("how", [*HOLD, *MOVE])
def test_a_holder_of_any_storage_is_noticed(how):
    owned = {number: [torch.zeros(4) for _ in range(3)] for number in (3, 5, 8)}
    memories = {number: SimpleNamespace(watch=watch(each)) for number, each in owned.items()}
    entries = [(number, memory, "whatever") for number, memory in memories.items()]
    among = {3: (0, 2), 8: (1,), 9: (0,)}
    for number, each in owned.items():
        for k, tensor in enumerate(each):
            assert fast.any_held_among(entries, among) is False
            assert fast.any_held(*memories[number].watch) is False
            holder = {**HOLD, **MOVE}[how](tensor)
            assert fast.any_held(*memories[number].watch) is True
            assert fast.any_held_among(entries, among) is (k in among.get(number, ()))
            assert fast.any_held_among(entries, {number: ()}) is False
            assert fast.any_held_among(tuple(entries), {number: (k,)}) is True
            del holder
            if how in MOVE:
                return


def test_what_watches_other_storages_is_refused():
    known = watch([torch.zeros(2)])
    assert fast.any_held((), b"") is False
    with pytest.raises(ValueError, match="as many"):
        fast.any_held(known[0], b"")
    with pytest.raises(IndexError):
        fast.any_held_among([(1, SimpleNamespace(watch=known))], {1: (1,)})


def test_an_input_is_exclusive_until_somebody_holds_it():
    exclusive = fast.exclusive
    args = [torch.zeros(4), None, torch.ones(4)]
    positions, counts = (0, 2), [users(args[0]), users(args[2])]
    assert exclusive(args, positions, counts) is True
    for name, hold in {**HOLD, **HOLD_IT}.items():
        holder = hold(args[2])
        assert exclusive(args, positions, counts) is False, name
        del holder
        assert exclusive(args, positions, counts) is True, name
    assert exclusive([None], (), ()) is True
    for wrong in ((positions, ()), ((3,), (1,))):
        with pytest.raises(IndexError):
            exclusive(args, *wrong)


def test_two_views_of_one_storage_are_exclusive_together():
    base = torch.zeros(4)
    args = [base.detach(), base[2:].detach()]
    del base
    count = users(args[0])
    assert fast.exclusive(args, (0, 1), [count] * 2) is True
    args.pop()
    assert fast.exclusive(args, (0,), [count]) is False, "fewer than when it was recorded"
    args.append(args[0])
    assert fast.exclusive(args, (0, 1), [users(args[0])] * 2) is False, "one tensor twice"


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


def test_a_stand_in_lies_where_it_is_told_until_it_is_resized():
    owner = torch.arange(6.0)
    bytes_ = fast.stand_in(owner.data_ptr(), 24, torch.empty(0))
    floats = bytes_.view(torch.float32)
    assert facts(bytes_) == facts(owner.view(torch.uint8).clone())
    floats[0] = 7
    assert owner[0] == 7
    bytes_.resize_(48)
    floats[0] = 8
    assert floats.tolist() == [8, 1, 2, 3, 4, 5]
    assert owner[0] == 7


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
    memory = array("f", [1, 2, 3])
    check_copies([torch.frombuffer(memory, dtype=torch.float32)])
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
    """What operators compute of a copy is what they compute of the original: addresses and strides are alike."""
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


@pytest.mark.multigpu(2)
def test_copies_on_another_device_than_the_current_one():
    with torch.cuda.device(0):
        check_copies([torch.ones(3, device="cuda:1")], "cuda:1")


def test_put_assigns():
    into = list("abcd")
    fast.put(into, (3, 1), [1, None])
    assert into == ["a", None, "c", 1]
    with pytest.raises(ValueError, match="as many values as positions"):
        fast.put(into, (0, 1), [1])
    with pytest.raises(IndexError):
        fast.put(into, (4,), [1])


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


ODD = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "no tensor": lambda: None,
}
TAKEN = {
    "aliases": ("quantised", "meta"),
    "views": ("quantised", "meta"),
    "static_key": ("quantised", "meta"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, on quantised and sparse tensors
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", TAKEN)
def test_tensors_that_are_not_plain_are_taken_or_refused(kind, name):
    odd = ODD[kind]()
    specs = {"aliases": ((0,),), "views": (((0, (1,), (1,), 0),),), "static_key": ((0,),)}
    try:
        found = getattr(fast, name)([odd], *specs[name])
    except (RuntimeError, TypeError):
        assert kind not in TAKEN[name]
        return
    assert kind in TAKEN[name]
    for tensor in () if isinstance(found, bytes) else found:
        assert (tensor.layout, tensor.dtype, tensor.device) == (odd.layout, odd.dtype, odd.device)


def test_no_reference_is_lost_or_kept():
    tensor, value = torch.zeros(2), object()
    args, specs = [tensor], ((0, (1,), (1,), 0),)
    before = (sys.getrefcount(tensor), sys.getrefcount(value))
    storage = tensor.untyped_storage()._cdata
    held = torch_private.storage_use_count(storage)
    for _ in range(10):
        fast.static_key(args, (0,))
        fast.aliases((tensor,), (0,))
        fast.views(args, specs)
        fast.copy_out([tensor, tensor], (0, 1))
        into = [None]
        fast.put(into, (0,), (value,))
        fast.unchanged([{"a": value}], ["a"], [value], [], b"")
        del into
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert torch_private.storage_use_count(storage) == held
