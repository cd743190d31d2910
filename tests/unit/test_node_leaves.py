"""Leaves whose gradients the compiled node has added at once, and those that it leaves to autograd's engine."""

import threading

import pytest
import torch

from cgpass.runtime import node

NUM = 4


@pytest.fixture(autouse=True)
def compiled():
    if not node.wait():
        pytest.skip("no C++ compiler")


def randn(seed):
    return torch.randn(3, generator=torch.Generator().manual_seed(seed))


class Function:
    """A node over leaves and an input behind another operator, whose gradient comes after those of the leaves."""

    def __init__(self, leaves=None, gradients=None):
        self.leaves = leaves or [randn(n).requires_grad_() for n in range(NUM)]
        self.gradients = gradients or [randn(10 + n) for n in range(len(self.leaves))]
        self.made = []
        self.looks = True
        self.seen = None

    def __call__(self):
        x = torch.zeros(3, requires_grad=True)
        self.behind = behind = x * 1
        out, positions = [torch.ones(3)], tuple(range(len(self.leaves) + 1))
        inputs = (*self.leaves, behind)
        node.attach()(self.run, (), inputs, positions, (), out, (0,), [], [], "Node", True)
        self.fn = out[0].grad_fn
        behind.register_hook(self.look)
        return out[0]

    def run(self, rest, saved, grads):
        saved.clear()
        grads.clear()
        made = [g.clone() for g in self.gradients]
        self.made = [0 if g.is_sparse else g.data_ptr() for g in made]
        return [*made, torch.zeros(3)]

    def look(self, gradient):
        """Whoever looks at edges holds the nodes where they lead, which then are not alone."""
        if self.looks:
            self.seen = [fn is not None for fn, _ in self.fn.next_functions]

    def grads(self):
        return [leaf.grad for leaf in self.leaves]


ALL = [True] * (NUM + 1)
ONE = [True] + [False] * (NUM - 1) + [True]


def test_all_but_one_are_added_at_once_and_are_edges_again_afterwards():
    fn = Function()
    fn().sum().backward()
    assert fn.seen == ONE
    assert [f is not None for f, _ in fn.fn.next_functions] == ALL
    ends = [f.variable for f, _ in fn.fn.next_functions[:NUM]]
    assert all(end is leaf for end, leaf in zip(ends, fn.leaves, strict=True))
    for grad, expected in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, expected)
    assert [grad.data_ptr() for grad in fn.grads()] == fn.made, "nobody else holds them: no copy"


def test_what_is_there_is_added_to_in_place():
    fn = Function()
    for leaf in fn.leaves:
        leaf.grad = torch.full((3,), 0.1)
    before = fn.grads()
    fn().sum().backward()
    assert fn.seen == ONE
    for old, new, gradient in zip(before, fn.grads(), fn.gradients, strict=True):
        assert old is new
        assert torch.equal(new, torch.full((3,), 0.1) + gradient)


def test_what_somebody_holds_is_copied():
    held = [randn(n) for n in range(NUM)]
    fn = Function(gradients=held)
    fn.run = lambda rest, saved, grads: [*held, torch.zeros(3)]
    fn().sum().backward()
    assert fn.seen == ONE
    for grad, gradient in zip(fn.grads(), held, strict=True):
        assert torch.equal(grad, gradient)
        assert grad.data_ptr() != gradient.data_ptr()


def test_a_leaf_that_gets_no_gradient():
    fn = Function()
    fn.gradients[1:3] = [None, None]
    fn.run = lambda rest, saved, grads: [
        *(None if g is None else g.clone() for g in fn.gradients),
        torch.zeros(3),
    ]
    fn().sum().backward()
    assert fn.seen == [True, True, True, False, True]
    assert [g is None for g in fn.grads()] == [False, True, True, False]


@pytest.mark.parametrize("in_turn", [True, False])
def test_two_backwards_of_graphs_that_both_live(in_turn):
    fn, other = Function(), Function()
    other.leaves = fn.leaves
    first, second = fn(), other()
    fn.looks = not in_turn
    first.sum().backward()
    assert fn.seen == (None if in_turn else ALL), "another node leads to the leaves, too"
    del first, fn.fn, fn.behind
    second.sum().backward()
    if in_turn:
        assert other.seen == ONE, "the other node is gone"
    for grad, a, b in zip(fn.grads(), fn.gradients, other.gradients, strict=True):
        assert torch.equal(grad, a + b)


def test_leaves_that_others_use_too_get_the_sum_of_all():
    fn = Function(gradients=[torch.full((3,), 1.0) for _ in range(NUM)])
    for leaf in fn.leaves:
        leaf.grad = torch.full((3,), 1e8)
    others = sum((leaf * 3).sum() for leaf in fn.leaves)
    (fn().sum() + others).backward()
    assert fn.seen == ALL
    expected = torch.full((3,), 1e8) + torch.full((3,), 4.0)  # one after the other: 1e8
    assert all(torch.equal(grad, expected) for grad in fn.grads())


def hook_on_leaf(leaf, called):
    leaf.register_hook(lambda g: called.append(1) or g * 2)
    return 2


def hook_after_accumulation(leaf, called):
    leaf.register_post_accumulate_grad_hook(
        lambda p: called.append(1) or setattr(p, "grad", p.grad * 2)
    )
    return 2


def hook_on_accumulator(leaf, called):
    accumulator = torch.autograd.graph.get_gradient_edge(leaf).node
    accumulator.register_hook(lambda *_: called.append(1))
    return 1


def hook_before_accumulator(leaf, called):
    accumulator = torch.autograd.graph.get_gradient_edge(leaf).node
    accumulator.register_prehook(lambda g: called.append(1) or (g[0] * 2,))
    return 2


@pytest.mark.parametrize(
    ("hook", "after"),
    [
        (hook_on_leaf, False),
        (hook_on_leaf, True),
        (hook_after_accumulation, False),
        (hook_after_accumulation, True),
        (hook_on_accumulator, True),
        (hook_before_accumulator, True),
    ],
)
def test_hooks_are_met(hook, after):
    fn, called = Function(), []
    factor = None if after else hook(fn.leaves[2], called)
    out = fn()
    if factor is None:
        factor = hook(fn.leaves[2], called)
    out.sum().backward()
    assert fn.seen == [True, False, True, False, True]
    assert called == [1]
    assert torch.equal(fn.leaves[2].grad, fn.gradients[2] * factor)
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])


def test_an_accumulator_that_somebody_holds():
    fn = Function()
    held = fn.leaves[1].view_as(fn.leaves[1]).grad_fn.next_functions[0][0]
    fn().sum().backward()
    assert fn.seen == [True, True, False, False, True]
    assert held.variable is fn.leaves[1]


def test_a_hook_on_the_node_sees_all_gradients():
    fn, seen = Function(), []
    out = fn()
    fn.fn.register_hook(lambda given, _: seen.extend(given))
    out.sum().backward()
    assert fn.seen == ALL
    for given, gradient in zip(seen, fn.gradients, strict=False):
        assert torch.equal(given, gradient)


def test_a_graph_that_is_retained_stays_as_it_is():
    fn = Function()
    fn().sum().backward(retain_graph=True)
    assert fn.seen == ALL


def test_a_graph_that_was_retained():
    fn = Function()
    out = fn()
    fn.looks = False
    out.sum().backward(retain_graph=True)
    fn.looks = True
    out.sum().backward()
    assert fn.seen == ONE
    for grad, gradient in zip(fn.grads(), fn.gradients, strict=True):
        assert torch.equal(grad, gradient + gradient)


def test_gradients_that_are_differentiated():
    fn = Function()
    with pytest.warns(UserWarning, match="create_graph=True"):
        fn().sum().backward(create_graph=True)
    assert fn.seen == ALL
    assert all(grad.requires_grad for grad in fn.grads())


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


@pytest.mark.parametrize("odd", ["dtype", "expanded", "sparse", "frozen"])
def test_gradients_that_autograd_converts_or_leaves_out(odd):
    fn = Function()
    gradient = fn.gradients[2]
    expected = gradient
    if odd == "dtype":
        fn.gradients[2] = gradient.double()
    elif odd == "expanded":
        fn.gradients[2] = gradient.expand(2, 3)
        expected = gradient * 2
    elif odd == "sparse":
        fn.gradients[2] = gradient.to_sparse()
        expected = fn.gradients[2]
    out = fn()
    if odd == "frozen":
        fn.leaves[2].requires_grad_(False)
        expected = None
    out.sum().backward()
    assert fn.seen == [True, False, odd != "frozen", False, True]
    grad = fn.leaves[2].grad
    if expected is None:
        assert grad is None
    else:
        assert grad.layout == expected.layout
        assert torch.equal(grad.to_dense(), expected.to_dense())
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])


def test_a_subclass_that_handles_operators():
    class Handles(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fn = Function()
    fn.leaves[1] = randn(1).as_subclass(Handles).requires_grad_()
    fn().sum().backward()
    assert fn.seen == [True, True, False, False, True]


def test_an_addition_that_fails_leaves_the_edges_in_place():
    fn = Function()
    fn.leaves[2].grad = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        fn().sum().backward()
    assert [f is not None for f, _ in fn.fn.next_functions] == ALL
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
