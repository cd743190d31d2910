"""The fewest switches between captured and eager groups, against brute force."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cgpass.compile.passes.partition import orders


def switches(captured, order):
    return sum(captured[a] != captured[b] for a, b in itertools.pairwise(order))


def fewest_by_brute_force(captured, before):
    """Fewest switches of all valid orders: depth first, giving up what is no better."""
    best = len(captured) + 1

    def visit(done, count):
        nonlocal best
        if count >= best:
            return
        if len(done) == len(captured):
            best = count
            return
        for node in range(len(captured)):
            if node not in done and all(each in done for each in before[node]):
                changed = bool(done) and captured[done[-1]] != captured[node]
                visit((*done, node), count + changed)

    visit((), 0)
    return best


def check_valid(before, order):
    assert sorted(order) == list(range(len(before)))
    place = {node: at for at, node in enumerate(order)}
    assert all(place[b] < place[n] for n in range(len(before)) for b in before[n])


@st.composite
def problems(draw, most=7):
    size = draw(st.integers(0, most))
    before = [{b for b in range(node) if draw(st.integers(0, 3)) == 0} for node in range(size)]
    return draw(st.lists(st.booleans(), min_size=size, max_size=size)), before


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_best_equals_brute_force(problem):
    captured, before = problem
    found = list(orders(captured, before))
    for order in found:
        check_valid(before, order)
    for both in (found[1:3], found[3:]):  # late stages, early ones
        best = min(switches(captured, order) for order in both)
        assert best == fewest_by_brute_force(captured, before)


def test_what_stood_late_runs_late_where_that_costs_no_switch():
    body, eager, cast, second, eager_too, last, unread = range(7)
    before = [set(), {body}, set(), {eager, cast}, {body}, {eager_too}, set()]
    captured = [at not in (eager, eager_too) for at in range(7)]
    _, late, _, early, _ = orders(captured, before)
    assert late == [body, eager, eager_too, cast, second, last, unread]
    assert early == [body, cast, unread, eager, eager_too, second, last]


def test_five_thousand_nodes_in_a_valid_order():
    rng = random.Random(8)
    before = [{rng.randrange(max(0, n - 8), n) for _ in range(2) if n} for n in range(5000)]
    captured = [rng.random() < 0.8 for _ in before]
    original, *staged = orders(captured, before)
    for order in staged:
        check_valid(before, order)
        assert switches(captured, order) < switches(captured, original)
