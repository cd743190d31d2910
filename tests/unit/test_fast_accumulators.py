"""Leaves forget the nodes that add to their gradients, and know them again."""

import pytest
import torch

from cgpass.graphed.accumulators import Accumulators
from cgpass.runtime import fast


def accumulator(leaf):
    return torch.autograd.graph.get_gradient_edge(leaf).node


def test_leaves_forget_their_accumulators_and_know_them_again():
    first, second, fixed = (
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.ones(2),
    )
    held = (first * 2).sum()
    node, fired = accumulator(first), []
    node.register_hook(lambda *grads: fired.append(1))
    taken = fast.take_accumulators([first, second, fixed])
    other = (first * 3 + second * 5).sum()
    assert accumulator(first) != node
    passing = accumulator(second)
    fast.put_accumulators([first, second, fixed], taken)
    assert accumulator(first) == node
    assert accumulator(second) == passing  # nobody knew another one before
    other.backward()
    assert fired == []
    held.backward()
    assert fired == [1]
    assert (first.grad.tolist(), second.grad.tolist()) == ([5.0, 5.0], [5.0, 5.0])


def test_leaves_that_were_frozen_meanwhile_know_their_accumulators_again():
    leaf = torch.ones(2, requires_grad=True)
    node = accumulator(leaf)
    taken = fast.take_accumulators([leaf])
    leaf.requires_grad_(False)
    fast.put_accumulators([leaf], taken)
    leaf.requires_grad_(True)
    assert accumulator(leaf) == node


def test_accumulators_of_what_is_no_leaf_are_refused():
    with pytest.raises(RuntimeError, match="only leaves"):
        fast.take_accumulators([torch.ones(2, requires_grad=True) * 2])
    with pytest.raises(ValueError, match="as many"):
        fast.put_accumulators([torch.ones(2)], [])
    with pytest.raises(ValueError, match="PyCapsule"):
        fast.put_accumulators([torch.ones(2)], [None])


def test_an_accumulator_that_died_meanwhile_is_made_anew():
    leaf = torch.ones(2, requires_grad=True)
    held = (leaf * 2).sum()
    taken = fast.take_accumulators([leaf])
    del held
    fast.put_accumulators([leaf], taken)
    del taken
    (leaf * 3).sum().backward()
    assert leaf.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("hook", [None, "register_hook", "register_prehook"])
def test_accumulators_without_hooks_are_dropped(hook):
    leaf, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    held = (leaf * 2).sum()
    known, fired = accumulator(leaf), []
    if hook is not None:
        getattr(known, hook)(lambda *grads: fired.append(1))
    fast.drop_accumulators([leaf, frozen, held])
    assert (accumulator(leaf) == known) == (hook is not None)
    (leaf * 3).sum().backward()
    held.backward()
    assert len(fired) == 2 * (hook is not None)
    assert leaf.grad.tolist() == [5.0, 5.0]


def test_a_capture_knows_no_accumulator_of_its_warm_up():
    """Whatever a module's hooks keep of it, as those of `torch.nn.utils.prune` do."""
    leaf = torch.ones(2, requires_grad=True)
    users, accumulators = leaf * 2, Accumulators()
    before = accumulator(leaf)
    accumulators.take([leaf])
    kept = leaf * 3  # by a warm-up
    of_warm_up = accumulator(leaf)
    assert of_warm_up != before
    accumulators.forget_warm_ups()
    assert accumulator(leaf) not in (before, of_warm_up)
    accumulators.put_back()
    assert accumulator(leaf) == before
    del kept, users
