"""Gradients of several leaves lie apart: what is added to one in place is added to no other."""

import torch
from torch import nn


def leaf(session, *size):
    return nn.Parameter(torch.zeros(*size, device=session.device))


def accumulated(session, fn, leaves, incoming, count=4):
    """Gradients after some backwards, with the last two added up."""
    call = session.compile(fn)
    for step in range(count):
        if step == count - 2:
            for each in leaves:
                each.grad = None
        call().backward(incoming)
    return [each.grad.unique().tolist() for each in leaves]


def test_gradients_that_are_views_of_each_other(way):
    session = way.session()
    a, b, c = leaf(session, 2, 4), leaf(session, 2, 4), leaf(session, 4, 2)
    incoming = torch.ones(4, 2, device=session.device)

    def fn():
        return ((a + b).view(4, 2) + c) * 2

    assert accumulated(session, fn, (a, b, c), incoming) == [[4.0]] * 3
    assert len({each.grad.data_ptr() for each in (a, b, c)}) == 3


def test_gradients_that_are_views_of_what_came_in(way):
    session = way.session()
    a, b = leaf(session, 2, 4), leaf(session, 4, 2)
    incoming = torch.ones(4, 2, device=session.device)

    def fn():
        return a.t() + b

    assert accumulated(session, fn, (a, b), incoming) == [[2.0]] * 2
    assert incoming.unique().tolist() == [1.0]
