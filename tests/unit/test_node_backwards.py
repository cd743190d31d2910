"""Backwards in which the compiled node has gradients of leaves added at once, and those in which it does not."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.leaves import ALL, NUM, ONE, Function, visits


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


def test_a_hook_on_the_node_sees_all_gradients():
    fn, seen = Function(), []
    out = fn()
    fn.fn.register_hook(lambda given, _: seen.extend(given))
    assert visits(out.sum().backward) == ALL
    for given, gradient in zip(seen, fn.gradients, strict=False):
        assert torch.equal(given, gradient)


def test_a_graph_that_is_retained_stays_as_it_is():
    fn = Function()
    assert visits(fn().sum().backward, retain_graph=True) == ALL


def test_a_graph_that_was_retained_stays_as_it_is():
    """Another thread may be in the backward that retained it."""
    fn = Function()
    out = fn()
    out.sum().backward(retain_graph=True)
    assert visits(out.sum().backward) == ALL
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient + gradient)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("retain", [False, None])
def test_gradients_that_are_differentiated(retain):
    fn = Function()
    assert visits(fn().sum().backward, create_graph=True, retain_graph=retain) == ALL
    assert all(grad.requires_grad for grad in fn.grads())


@pytest.mark.parametrize("saved", [False, True])
def test_a_node_that_does_not_run_once_is_gone_through_again_while_a_backward_runs(saved):
    fn = Function(once=False, saved=[torch.ones(3)] if saved else ())
    out, again = fn(), []
    second = (out * 2).sum()

    def go_through(gradient):
        if not again:
            again.append(1)
            try:
                second.backward()
            except RuntimeError as error:
                again.append(str(error))

    fn.behind.register_hook(go_through)
    # the second comes to all leaves, or to none
    assert visits(out.sum().backward) == (ONE if saved else 2 * ALL)
    if saved:
        assert "backward through the graph a second time" in again[1]
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient if saved else gradient + gradient)


def test_hooks_find_the_edges_where_they_were():
    fn, found = Function(), []
    out = fn()
    fn.behind.register_hook(lambda gradient: found.extend(fn.fn.next_functions))
    assert visits(out.sum().backward) == ONE
    assert [end.variable for end, _ in found[:NUM]] == fn.leaves
    assert found[NUM][0] is fn.behind.grad_fn


@pytest.mark.parametrize("call", ["grad", "backward"])
def test_a_hook_that_goes_to_one_leaf_through_what_is_gone(call):
    """The engine finds the way by the edges: without one to the leaf it would leave out the node, which refuses."""
    fn, refused = Function(once=False, saved=[torch.ones(3)]), []
    out, leaf = fn(), fn.leaves[2]
    with_another_way = (out * 2).sum() + (leaf * 3).sum()

    def go_through(gradient):
        try:
            if call == "grad":
                torch.autograd.grad(with_another_way, [leaf])
            else:
                with_another_way.backward(inputs=[leaf])
        except RuntimeError as error:
            refused.append(str(error))

    fn.behind.register_hook(go_through)
    out.sum().backward()
    assert "backward through the graph a second time" in refused[0]
    assert torch.equal(leaf.grad, fn.gradients[2])


class Listed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_autograd_does():
    fn = Function()
    out = fn().sum()
    with Listed() as mode:
        assert visits(out.backward) == ALL
    assert mode.ops.count(torch.ops.aten.detach.default) >= NUM


def test_named_inputs():
    fn = Function()
    found = torch.autograd.grad(fn().sum(), fn.leaves)
    assert fn.grads() == [None] * NUM
    assert all(torch.equal(a, b) for a, b in zip(found, fn.gradients, strict=True))
    fn().sum().backward(inputs=fn.leaves[1:3])
    assert [grad is not None for grad in fn.grads()] == [False, True, True, False]


def test_a_node_that_is_called_by_itself_adds_to_nothing():
    fn = Function()
    out = fn()
    found = fn.fn(torch.ones(3))
    assert fn.grads() == [None] * NUM
    assert all(torch.equal(a, b) for a, b in zip(found, fn.gradients, strict=False))
    del out


def test_a_node_that_is_called_by_itself_in_a_backward_of_something_else():
    fn, found = Function(), []
    out, z = fn(), torch.ones(3, requires_grad=True)
    z.register_hook(lambda g: found.extend(fn.fn(torch.ones(3))))
    (z * 2).sum().backward()
    assert fn.grads() == [None] * NUM
    assert all(torch.equal(a, b) for a, b in zip(found, fn.gradients, strict=False))
    del out


@pytest.mark.parametrize("hooked", ["output", "node"])
def test_a_hook_that_calls_the_node_before_autograd_does(hooked):
    fn, found = Function(once=False, saved=[torch.ones(3)]), []
    out = fn()

    def call(gradient):
        if not found:
            found.extend(fn.fn(torch.ones(3)))

    (out.register_hook if hooked == "output" else fn.fn.register_prehook)(call)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    assert fn.grads() == [None] * NUM
    assert all(torch.equal(a, b) for a, b in zip(found, fn.gradients, strict=False))


def test_anomalies_are_detected():
    fn = Function()
    fn.gradients[2] = torch.full((3,), torch.nan)
    with (
        pytest.warns(UserWarning, match="Traceback of forward call"),
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="returned nan values in its 2th output"),
    ):
        fn().sum().backward()
    assert fn.grads() == [None] * NUM


def test_an_addition_that_fails_leaves_the_edges_in_place():
    fn = Function()
    fn.leaves[2].grad = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        fn().sum().backward()
    assert all(end is not None for end, _ in fn.fn.next_functions)
    assert torch.equal(fn.leaves[1].grad, fn.gradients[1])
    assert fn.leaves[3].grad is None


def test_a_backward_that_fails_elsewhere_leaves_the_edges_in_place():
    """The node saves nothing: its graph may be gone through again."""
    fn = Function()
    out = fn()

    def fails(gradient):
        raise ValueError("not this time")

    hook = fn.behind.register_hook(fails)
    with pytest.raises(ValueError, match="not this time"):
        out.sum().backward()
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])
    hook.remove()
    out.sum().backward()
    for grad, gradient in list(zip(fn.grads(), fn.gradients, strict=True))[1:]:
        assert torch.equal(grad, gradient + gradient)


def test_threads_that_train_the_same_leaves():
    leaves = [torch.zeros(3, requires_grad=True) for _ in range(64)]
    ones = [torch.ones(3) for _ in leaves]
    for leaf in leaves:
        leaf.grad = torch.zeros(3)
    errors = []

    def train():
        try:
            for _ in range(50):
                Function(leaves, ones)().sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(leaf.grad.tolist() == [200.0] * 3 for leaf in leaves)


def test_what_is_saved_stays_while_a_hook_unpacks_it_and_another_thread_is_done_with_it():
    inside, released = threading.Event(), threading.Event()

    def unpack(tensor):
        if threading.current_thread().name == "keeps" and not inside.is_set():
            inside.set()
            released.wait(60)
        return tensor

    fn = Function(once=False, saved=[torch.ones(1 << 16) for _ in range(8)])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = fn()
    fn.behind.register_hook(lambda gradient: released.set())
    keeps, drops = (out * 1).sum(), (out * 2).sum()

    def keep():
        keeps.backward(retain_graph=True)

    thread = threading.Thread(target=keep, name="keeps")
    thread.start()
    inside.wait(60)
    drops.backward()
    thread.join()
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient + gradient)
