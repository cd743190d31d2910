"""The fewest colour switches, against brute force and within a memory limit."""

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgpass.compile.passes.partition import (
    OrderingProblem,
    count_switches,
    find_order,
    peak_bytes,
)


def problem(colours, before, sizes=None, reads=None, kept=()):
    return OrderingProblem(
        captured=tuple(colours),
        predecessors=tuple(tuple(b) for b in before),
        allocated_bytes=tuple(sizes or [0] * len(colours)),
        reads=tuple(tuple(r) for r in (before if reads is None else reads)),
        kept=frozenset(kept),
    )


def fewest_by_brute_force(p, increase):
    """Fewest switches of all orders within the limit: depth first, giving up what is no better."""
    limit = math.floor(naive_peak(p, range(len(p))) * (1 + increase))
    best = len(p) + 1

    def visit(done, switches):
        nonlocal best
        if switches >= best:
            return
        if len(done) == len(p):
            best = switches
            return
        for node in range(len(p)):
            if node in done or any(before not in done for before in p.predecessors[node]):
                continue
            if live_bytes(p, done) + p.allocated_bytes[node] > limit:
                continue
            changed = bool(done) and p.captured[done[-1]] != p.captured[node]
            visit((*done, node), switches + changed)

    visit((), 0)
    return best


def live_bytes(p, done):
    left = [node for node in range(len(p)) if node not in done]
    return sum(
        p.allocated_bytes[value]
        for value in done
        if value in p.kept or any(value in p.reads[node] for node in left)
    )


def naive_peak(p, order):
    order = tuple(order)
    return max(
        (live_bytes(p, order[:i]) + p.allocated_bytes[order[i]] for i in range(len(order))),
        default=0,
    )


def check_valid(p, order, increase):
    assert sorted(order) == list(range(len(p)))
    place = {node: at for at, node in enumerate(order)}
    assert all(place[b] < place[n] for n in range(len(p)) for b in p.predecessors[n])
    assert peak_bytes(p, order) <= math.floor(peak_bytes(p, range(len(p))) * (1 + increase))


@st.composite
def problems(draw, most=7):
    size = draw(st.integers(0, most))
    before = [[b for b in range(node) if draw(st.integers(0, 3)) == 0] for node in range(size)]
    return problem(
        draw(st.lists(st.booleans(), min_size=size, max_size=size)),
        before,
        draw(st.lists(st.integers(0, 40), min_size=size, max_size=size)),
        [[b for b in bs if draw(st.integers(0, 4))] for bs in before],
        draw(st.sets(st.integers(0, size - 1))) if size else (),
    )


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.05, 0.3, 10.0]))
def test_equals_brute_force(p, increase):
    """Where some order with the fewest switches is within the limit; else no worse than the original."""
    order = find_order(p, increase)
    check_valid(p, order, increase)
    if increase == 10.0 and len(p):
        assert count_switches(p, order) == fewest_by_brute_force(p, increase)
    assert count_switches(p, order) <= count_switches(p, range(len(p)))
    assert peak_bytes(p, order) == naive_peak(p, order)
    assert find_order(p, increase) == order


@pytest.mark.parametrize(("width", "increase"), [(8, 0.05), (5000, 0.0)])
def test_five_thousand_nodes_are_ordered_quickly(width, increase):
    rng = random.Random(width)
    size = 5000
    before = [
        sorted({rng.randrange(max(0, n - width), n) for _ in range(2)}) if n else []
        for n in range(size)
    ]
    p = problem(
        [rng.random() < 0.8 for _ in range(size)],
        before,
        [rng.choice([0, 4, 1000]) for _ in range(size)],
        kept={size - 1},
    )
    start = time.process_time()  # a busy machine's other work is not in it
    order = find_order(p, increase)
    elapsed_s = time.process_time() - start
    check_valid(p, order, increase)
    assert count_switches(p, order) <= count_switches(p, range(size))
    assert elapsed_s < 20
