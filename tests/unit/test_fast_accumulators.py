"""Leaves forget the nodes that add to their gradients, and know them again."""

import pytest
import torch

from cgpass.graphed.accumulators import Accumulators
from cgpass.runtime import fast, node

PYTHON = fast.PYTHON


def accumulator(leaf):
    return torch.autograd.graph.get_gradient_edge(leaf).node


def test_leaves_forget_their_accumulators_and_know_them_again(functions):
    first, second, fixed = (
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True),
        torch.ones(2),
    )
    held = (first * 2).sum()
    node, fired = accumulator(first), []
    node.register_hook(lambda *grads: fired.append(1))
    taken = functions["take_accumulators"]([first, second, fixed])
    other = (first * 3 + second * 5).sum()
    if functions is not PYTHON:
        assert accumulator(first) != node
    passing = accumulator(second)
    functions["put_accumulators"]([first, second, fixed], taken)
    assert accumulator(first) == node
    assert accumulator(second) == passing  # nobody knew another one before
    if functions is not PYTHON:
        other.backward()
        assert fired == []
        held.backward()
        assert fired == [1]
        assert (first.grad.tolist(), second.grad.tolist()) == ([5.0, 5.0], [5.0, 5.0])


def test_leaves_that_were_frozen_meanwhile_know_their_accumulators_again(functions):
    leaf = torch.ones(2, requires_grad=True)
    node = accumulator(leaf)
    taken = functions["take_accumulators"]([leaf])
    leaf.requires_grad_(False)
    functions["put_accumulators"]([leaf], taken)
    leaf.requires_grad_(True)
    assert accumulator(leaf) == node


def test_accumulators_of_what_is_no_leaf_are_refused(functions):
    if functions is PYTHON:
        assert functions["take_accumulators"]([torch.ones(2)]) == [None]
        return
    with pytest.raises(RuntimeError, match="only leaves"):
        functions["take_accumulators"]([torch.ones(2, requires_grad=True) * 2])
    with pytest.raises(ValueError, match="as many"):
        functions["put_accumulators"]([torch.ones(2)], [])
    with pytest.raises(ValueError, match="PyCapsule"):
        functions["put_accumulators"]([torch.ones(2)], [None])


def test_an_accumulator_that_died_meanwhile_is_made_anew(functions):
    leaf = torch.ones(2, requires_grad=True)
    held = (leaf * 2).sum()
    taken = functions["take_accumulators"]([leaf])
    del held
    functions["put_accumulators"]([leaf], taken)
    del taken
    (leaf * 3).sum().backward()
    assert leaf.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("hook", [None, "register_hook", "register_prehook"])
def test_accumulators_without_hooks_are_dropped(hook):
    if not node.wait():
        pytest.skip("no C++ compiler")
    leaf, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    held = (leaf * 2).sum()
    known, fired = accumulator(leaf), []
    if hook is not None:
        getattr(known, hook)(lambda *grads: fired.append(1))
    node.drop_accumulators([leaf, frozen, held])
    assert (accumulator(leaf) == known) == (hook is not None)
    (leaf * 3).sum().backward()
    held.backward()
    assert len(fired) == 2 * (hook is not None)
    assert leaf.grad.tolist() == [5.0, 5.0]


def test_a_capture_knows_no_accumulator_of_its_warm_up():
    """Whatever a module's hooks keep of it, as those of `torch.nn.utils.prune` do."""
    if not node.wait():
        pytest.skip("nothing is compiled")
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
