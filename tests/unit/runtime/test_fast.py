"""The native functions that every recording uses; those of graphed callables and whole steps are tested there."""

import contextlib
import random
import sys
import threading
import weakref
from array import array

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgpass.runtime import fast
from tests.unit.runtime.leaves import ALL, NUM, ONE, TWO, Function, Listed, randn, visits


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
    found = fast.aliases(tuple(originals), tuple(range(len(originals))))
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
    num_bytes = fast.copy_out(results, tuple(range(len(sources))))
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
    assert fast.copy_out(results, tuple(range(len(sources)))) == num_bytes
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
    held = torch._C._storage_Use_Count(storage)
    for _ in range(10):
        fast.static_key(args, (0,))
        fast.aliases((tensor,), (0,))
        fast.views(args, specs)
        fast.copy_out([tensor, tensor], (0, 1))
        fast.unchanged([{"a": value}], ["a"], [value], [], b"")
    assert (sys.getrefcount(tensor), sys.getrefcount(value)) == before
    assert torch._C._storage_Use_Count(storage) == held


# ---- the compiled node: leaves whose gradients it adds at once, those that it leaves to autograd's engine, what it saves


@pytest.mark.parametrize("there", [False, True])
def test_all_but_one_are_added_by_the_node(there):
    fn = Function()
    for leaf in fn.leaves if there else ():
        leaf.grad = torch.full((3,), 0.1)
    before = fn.grads()
    assert visits(fn().sum().backward) == ONE
    ends = [f.variable for f, _ in fn.fn.next_functions[:NUM]]
    assert all(end is leaf for end, leaf in zip(ends, fn.leaves, strict=True))
    for old, new, gradient in zip(before, fn.grads(), fn.gradients, strict=True):
        assert torch.equal(new, torch.full((3,), 0.1) + gradient if there else gradient)
        assert old is (new if there else None)
    if not there:
        assert [grad.data_ptr() for grad in fn.grads()] == fn.made, "nobody holds them: no copy"


@pytest.mark.parametrize("sharing", [range(9), (7, 8)])
@pytest.mark.parametrize("as_views", [False, True])
def test_leaves_that_have_one_gradient_get_theirs_in_autograds_order(sharing, as_views):
    gradients = [randn(n) * 10.0 ** (n - 4) for n in range(9)]
    sums = []
    for hooked in (True, False):
        leaves = [torch.zeros(3, requires_grad=True) for _ in range(9)]
        fn = Function(leaves, gradients)
        shared = torch.full((3,), 0.1)
        for n in sharing:
            leaves[n].grad = shared.detach() if as_views else shared
        out = fn()
        if hooked:
            fn.fn.register_hook(lambda *_: None)
        assert visits(out.sum().backward) == len(leaves) + 1
        sums.append(shared)
    assert torch.equal(*sums)


def test_what_somebody_holds_is_copied():
    held = [randn(n) for n in range(NUM)]
    fn = Function(gradients=held)
    fn.run = lambda rest, saved, grads: [saved.clear(), *held, torch.zeros(3)][1:]
    assert visits(fn().sum().backward) == ONE
    for grad, gradient in zip(fn.grads(), held, strict=True):
        assert torch.equal(grad, gradient)
        assert grad.data_ptr() != gradient.data_ptr()


def test_leaves_that_others_use_too_get_the_sum_of_all():
    fn = Function(gradients=[torch.full((3,), 1.0) for _ in range(NUM)])
    for leaf in fn.leaves:
        leaf.grad = torch.full((3,), 1e8)
    others = sum((leaf * 3).sum() for leaf in fn.leaves)
    assert visits((fn().sum() + others).backward) == ALL
    expected = torch.full((3,), 1e8) + torch.full((3,), 4.0)  # one after the other: 1e8
    assert all(torch.equal(grad, expected) for grad in fn.grads())


@pytest.mark.parametrize("in_turn", [True, False])
def test_two_backwards_of_graphs_that_both_live(in_turn):
    fn, other = Function(), Function()
    other.leaves = fn.leaves
    first, second = fn(), other()
    assert visits(first.sum().backward) == ALL, "another node leads to the leaves, too"
    if in_turn:
        del first, fn.fn, fn.behind
    assert visits(second.sum().backward) == (ONE if in_turn else ALL)
    for grad, a, b in zip(fn.grads(), fn.gradients, other.gradients, strict=True):
        assert torch.equal(grad, a + b)


class Handles(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def sparse(fn):
    fn.gradients[2] = fn.gradients[2].to_sparse()
    return fn.gradients[2].to_dense()


def sparse_there(fn):
    fn.leaves[2].grad = torch.ones(3).to_sparse()
    return torch.ones(3) + fn.gradients[2]


def other_dtype(fn):
    expected, fn.gradients[2] = fn.gradients[2], fn.gradients[2].double()
    return expected


def expanded(fn):
    expected, fn.gradients[2] = fn.gradients[2] * 2, fn.gradients[2].expand(2, 3)
    return expected


def subclass(fn):
    fn.leaves[2] = randn(1).as_subclass(Handles).requires_grad_()
    return fn.gradients[2]


def held(fn):
    fn.held = fn.leaves[2].view_as(fn.leaves[2]).grad_fn.next_functions[0][0]
    return fn.gradients[2]


@pytest.mark.parametrize("odd", [sparse, sparse_there, other_dtype, expanded, subclass, held])
def test_a_leaf_that_is_odd_is_left_to_the_engine(odd):
    fn = Function()
    expected = odd(fn)
    assert visits(fn().sum().backward) == TWO
    assert torch.equal(fn.leaves[2].grad.to_dense(), expected)
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("how", ["hooked", "retained", "was retained", "differentiated", "mode"])
def test_backwards_that_come_to_all_leaves(how):
    fn, seen, times, mode = Function(), [], 1, contextlib.nullcontext()
    out = fn()
    options = {"retain_graph": True} if how == "retained" else {}
    if how == "hooked":
        fn.fn.register_hook(lambda given, _: seen.extend(given))
    elif how == "was retained":  # another thread may be in the backward that retained it
        out.sum().backward(retain_graph=True)
        times = 2
    elif how == "differentiated":
        options = {"create_graph": True, "retain_graph": False}
    elif how == "mode":
        mode = Listed()
    loss = out.sum()
    with mode:
        assert visits(loss.backward, **options) == ALL
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient * times)
        assert grad.requires_grad is (how == "differentiated")
    assert len(seen) == (NUM + 1 if how == "hooked" else 0)
    if how == "mode":
        assert mode.ops.count(torch.ops.aten.detach.default) >= NUM


@pytest.mark.parametrize("call", ["next_functions", "grad", "backward", "all"])
def test_a_hook_that_looks_at_what_is_gone(call):
    """The engine finds the way by the edges: without one to the leaf it would leave out the node, which refuses."""
    fn, refused, ends = Function(), [], []
    out, leaf = fn(), fn.leaves[2]
    with_another_way = (out * 2).sum() + (leaf * 3).sum()

    def go_through(gradient):
        if refused or ends:
            return
        ends.extend(fn.fn.next_functions)
        try:
            if call == "grad":
                torch.autograd.grad(with_another_way, [leaf])
            elif call == "backward":
                with_another_way.backward(inputs=[leaf])
            elif call == "all":
                with_another_way.backward()
        except RuntimeError as error:
            refused.append(str(error))

    fn.behind.register_hook(go_through)
    # another way leads to the one leaf
    assert visits(out.sum().backward) >= TWO
    assert [end.variable for end, _ in ends[:NUM]] == fn.leaves
    assert ends[NUM][0] is fn.behind.grad_fn
    if call != "next_functions":
        assert "backward through the graph a second time" in refused[0]
    if call != "all":
        assert torch.equal(leaf.grad, fn.gradients[2])


def test_a_backward_that_fails_leaves_the_edges_in_place():
    fn = Function()
    out = fn()
    fn.leaves[2].grad = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        out.sum().backward()
    assert all(end is not None for end, _ in fn.fn.next_functions)
    assert torch.equal(fn.leaves[1].grad, fn.gradients[1])
    assert fn.leaves[3].grad is None


def test_what_is_saved_stays_while_a_hook_unpacks_it_and_another_thread_is_done_with_it():
    inside, released = threading.Event(), threading.Event()

    def unpack(tensor):
        if threading.current_thread().name == "keeps" and not inside.is_set():
            inside.set()
            released.wait(60)
        return tensor

    fn = Function()
    fn.saved = [torch.ones(1 << 16) for _ in range(8)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = fn()
    fn.behind.register_hook(lambda gradient: released.set())
    keeps, drops = (out * 1).sum(), (out * 2).sum()
    thread = threading.Thread(target=lambda: keeps.backward(retain_graph=True), name="keeps")
    thread.start()
    inside.wait(60)
    drops.backward()
    thread.join()
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient + gradient)


@pytest.mark.parametrize("checked", [True, False])
def test_what_a_backward_reads_dies_as_soon_as_the_backward_gave_it_up(checked):
    alive = []

    def run(rest, saved, grads):
        storages = [StorageWeakRef(t.untyped_storage()) for t in (*saved, *grads)]
        saved.clear()
        grads.clear()
        alive.extend(not storage.expired() for storage in storages)
        return [torch.ones(4)]

    x, outputs, saved = torch.randn(4, requires_grad=True), [torch.ones(4)], torch.ones(4)
    weakref.finalize(saved, lambda: None)  # known to Python until it dies
    lists = ([saved], []) if checked else ([], [saved])
    fast.attach(run, (), (x,), (0,), outputs, (0,), *lists, "Node")
    del saved, lists
    outputs[0].backward(torch.ones(4))
    assert alive == [False, True]  # the caller has the gradient
    assert x.grad.tolist() == [1.0] * 4
