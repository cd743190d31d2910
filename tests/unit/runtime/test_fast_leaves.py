"""The compiled node: leaves whose gradients it adds at once, those that it leaves to autograd's engine, what it saves."""

import contextlib
import threading
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cgpass.runtime import fast
from tests.unit.runtime.leaves import ALL, NUM, ONE, TWO, Function, randn, visits


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


# ---- leaves that are left to the engine


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


# ---- backwards that are left to the engine


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


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


# ---- the edges


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


# ---- threads


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


# ---- what it saves


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
