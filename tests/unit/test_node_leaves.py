"""Leaves whose gradients the compiled node has added at once, and those that it leaves to autograd's engine."""

import pytest
import torch

from tests.unit.leaves import ALL, NUM, ONE, TWO, Function, randn, visits


def test_all_but_one_are_added_by_the_node():
    fn = Function()
    assert visits(fn().sum().backward) == ONE
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
    assert visits(fn().sum().backward) == ONE
    for old, new, gradient in zip(before, fn.grads(), fn.gradients, strict=True):
        assert old is new
        assert torch.equal(new, torch.full((3,), 0.1) + gradient)


@pytest.mark.parametrize("sharing", [range(9), (7, 8), (0, 3)])
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
    fn.run = lambda rest, saved, grads: [*held, torch.zeros(3)]
    assert visits(fn().sum().backward) == ONE
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
    assert visits(fn().sum().backward) == TWO + 1
    assert [g is None for g in fn.grads()] == [False, True, True, False]


def test_leaves_that_others_use_too_get_the_sum_of_all():
    fn = Function(gradients=[torch.full((3,), 1.0) for _ in range(NUM)])
    for leaf in fn.leaves:
        leaf.grad = torch.full((3,), 1e8)
    others = sum((leaf * 3).sum() for leaf in fn.leaves)
    assert visits((fn().sum() + others).backward) == ALL
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
    assert visits(out.sum().backward) == TWO
    assert called == [1]
    assert torch.equal(fn.leaves[2].grad, fn.gradients[2] * factor)
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])


def test_an_accumulator_that_somebody_holds():
    fn = Function()
    held = fn.leaves[1].view_as(fn.leaves[1]).grad_fn.next_functions[0][0]
    assert visits(fn().sum().backward) == TWO
    assert held.variable is fn.leaves[1]


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
    found = visits(out.sum().backward)
    assert found == (ONE if odd == "frozen" else TWO)
    grad = fn.leaves[2].grad
    if expected is None:
        assert grad is None
    else:
        assert grad.layout == expected.layout
        assert torch.equal(grad.to_dense(), expected.to_dense())
    assert torch.equal(fn.leaves[3].grad, fn.gradients[3])


def test_a_sparse_gradient_that_is_there():
    fn = Function()
    fn.leaves[2].grad = torch.ones(3).to_sparse()
    assert visits(fn().sum().backward) == TWO
    assert torch.equal(fn.leaves[2].grad.to_dense(), torch.ones(3) + fn.gradients[2])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
def test_gradients_of_a_dtype_of_their_own():
    fn = Function()
    fn.leaves[2].grad_dtype = torch.bfloat16
    assert visits(fn().sum().backward) == TWO
    assert torch.equal(fn.leaves[2].grad, fn.gradients[2].bfloat16())


def test_a_subclass_that_handles_operators():
    class Handles(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fn = Function()
    fn.leaves[1] = randn(1).as_subclass(Handles).requires_grad_()
    assert visits(fn().sum().backward) == TWO
