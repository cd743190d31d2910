"""Partitions: few, in a valid order, the same on every run."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgpass.compile.facts import partition_tag, values
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.passes.base import PassContext, graph_text, run_passes
from cgpass.compile.passes.partition import Partition, join_collectives, orders
from cgpass.runtime.simulated import SimulatedDriver
from tests.graphs import CUDA, fake_cuda_graph, ints, node_named

CONTEXT = PassContext(CUDA, "partition", "forward")
aten = torch.ops.aten


def partition(gm, **settings):
    found = run_passes([Partition(**{"min_partition_ops": 1, **settings})], gm, CONTEXT)
    assert not any(tag.captured for tag, _ in found)
    return [reason for _, reason in found]


def order(gm):
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def tags(gm):
    found = (partition_tag.get_tag(node) for node in gm.graph.nodes)
    return list(dict.fromkeys(str(tag) for tag in found if tag))


def two_syncs(x, y):
    a = x.relu()
    i = torch.nonzero(a)
    b = y.relu()
    j = torch.nonzero(b)
    return i, j, a + b


def test_a_result_that_was_moved_out_of_its_partition_is_put_back():
    def fn(x):
        largest, where = x.max(0)
        return torch.nonzero(largest), where

    gm = fake_cuda_graph(fn, (4, 4))
    partition(gm)
    names = order(gm)
    (output,) = gm.graph.find_nodes(op="output")
    output.prepend(node_named(gm, "getitem_1"))
    assert names != order(gm)
    partition(gm)
    assert order(gm) == names


def test_no_order_is_taken_for_leaving_all_partitions_too_small():
    def fn(x, y):
        x = x.relu()
        return x.sin().cos().exp(), y.sin().cos().exp()

    gm = fake_cuda_graph(fn, (4,), (4,))
    partition(gm, unsafe_ops=frozenset({"aten::relu"}), min_partition_ops=4)
    assert tags(gm) == ["eager_0", "captured_1"]


def test_views_of_what_is_eager_are_copied_into_no_partition():
    def gradients(x):
        made = x.exp()
        read = made.view(16)
        parts = made.view(2, 8).transpose(0, 1), made.split(2)[1], read.view(8, 2)
        return *parts, read.sin(), x.relu()

    gm = fake_cuda_graph(gradients, (4, 4))
    notes = partition(gm, unsafe_ops=frozenset(["aten::exp"]))
    eager = ["exp", "view_1", "transpose", "split", "getitem", "getitem_1"]
    assert order(gm) == [*eager, "view", "view_2", "sin", "relu"]
    found = {name: str(partition_tag.get_tag(node_named(gm, name))) for name in order(gm)}
    assert found == {name: "eager_0" if name in eager else "captured_1" for name in found}
    assert [note.op for note in notes] == ["aten.exp.default"]


def test_a_view_whose_size_comes_later_is_made_later():
    def some(x, sizes):
        made = x.exp()
        size = sizes.relu().sum().item()
        torch._check(size >= 0)
        torch._check(size <= 4)
        return made.narrow(0, 0, size), made.narrow(0, 1, 2)

    gm = fake_cuda_graph(some, (4, 4), ints(4))
    unsafe = frozenset(["aten::exp"])
    partition(gm, unsafe_ops=unsafe)
    found = order(gm)
    assert found.index("_local_scalar_dense") < found.index("slice_1")


def reduce_twice(x):
    reduce, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
    a = wait(reduce(torch.nonzero(x).sum(), "sum", "0"))
    return a, wait(reduce(x, "sum", "0"))


def test_collectives_that_no_data_orders_keep_their_order():
    """As random operators, writes and side effects of random graphs do."""
    gm = fake_cuda_graph(reduce_twice, (4,))
    before = [node.name for node in gm.graph.nodes if values.is_collective(node)]
    assert len(before) == 4
    partition(gm, unsafe_ops=frozenset(["aten::sum"]))
    assert [node.name for node in gm.graph.nodes if values.is_collective(node)] == before


def test_what_leaves_too_little_to_a_partition_runs_early():
    """The cosines stood between both exponentials, where a sum alone would be too small."""

    def fn(x):
        first = x.sin().sin()
        waits = first.exp() + 1
        cosines = first.cos().cos()
        return waits.exp().tan().tan(), cosines

    gm = fake_cuda_graph(fn, (4,))
    partition(gm, unsafe_ops=frozenset(["aten::exp"]), min_partition_ops=2)
    assert tags(gm) == ["captured_0", "eager_1", "captured_2"]
    assert order(gm) == ["sin", "sin_1", "cos", "cos_1", "exp", "add", "exp_1", "tan", "tan_1"]


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda x: x.sin().view(2, 2).t(), "captured_0"),
        (lambda x: x.view(2, 2).t(), "eager_0"),
    ],
)
def test_a_graph_without_boundaries_is_captured_if_it_does_any_work(fn, found):
    gm = fake_cuda_graph(fn, (4,))
    notes = partition(gm, min_partition_ops=4)
    assert tags(gm) == [found]
    assert {note.code for note in notes} == ({"no_work"} if found == "eager_0" else set())


def test_attributes_come_before_their_first_user():
    gm = fake_cuda_graph(two_syncs, (4,), (4,))
    gm.scale = torch.nn.Parameter(torch.ones(4))
    relu, nonzero, late = (node_named(gm, name) for name in ("relu", "nonzero", "relu_1"))
    with gm.graph.inserting_before(late):
        scale = gm.graph.get_attr("scale")
    late.replace_input_with(late.args[0], scale)
    partition(gm)
    assert [node.name for node in (relu.next, relu.next.next)] == ["scale", "relu_1"]
    assert partition_tag.get_tag(scale) is None
    assert partition_tag.get_tag(nonzero).index == 1


# ---- the fewest switches between captured and eager groups, against brute force


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


collectives = torch.ops._c10d_functional
GROUP = "0"


def joined(fn, *shapes, unsafe=("aten::tanh",)):
    gm = fake_cuda_graph(fn, *shapes)
    run_passes([Partition(frozenset(unsafe), 1)], gm, PassContext(CUDA, "graph", "forward"))
    once = graph_text(gm)
    join_collectives(gm)
    assert graph_text(gm) == once
    return gm


def waits_of(gm):
    """Waits: partition and value, which the wait has the facts of."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    waits = [n for n in gm.graph.nodes if n.target is wait]
    assert all(n.meta["val"].shape == n.args[0].meta["val"].shape for n in waits)
    return [(str(get_tag(n)), n.args[0].name) for n in waits]


def waited_here(x):
    started = collectives.all_reduce(x.sin(), "sum", GROUP)
    y = x.cos()
    return collectives.wait_tensor(started) + y.tanh()


def read_unwaited(x):
    started = collectives.all_reduce(x.sin(), "sum", GROUP)
    return started.view(2, 2), collectives.wait_tensor(started.tanh())


def started_eagerly(x):
    return collectives.wait_tensor(collectives.all_reduce(x.tanh(), "sum", GROUP)).sin()


def returned(x):
    first, second = collectives.all_gather_into_tensor_coalesced([x.sin(), x.cos()], 2, GROUP)
    return first, collectives.wait_tensor(second).exp(), x.tanh()


def unread(x):
    first, _ = collectives.all_reduce_coalesced([x.sin(), x.cos()], "sum", GROUP)
    return collectives.wait_tensor(first).exp()


def read_elsewhere(x):
    first, second = collectives.all_reduce_coalesced([x.sin(), x.cos()], "sum", GROUP)
    return x.sin().tanh() + collectives.wait_tensor(second) + collectives.wait_tensor(first)


@pytest.mark.parametrize(
    ("fn", "waits"),
    [
        (waited_here, [("captured_0", "all_reduce")]),
        (read_unwaited, [("captured_0", "all_reduce"), ("captured_2", "tanh")]),
        (started_eagerly, [("eager_0", "all_reduce"), ("captured_1", "wait_tensor_default")]),
        (returned, [("captured_0", "getitem_1"), ("captured_0", "getitem")]),
        (unread, [("captured_0", "getitem"), ("captured_0", "getitem_1")]),
        (
            read_elsewhere,
            [
                *(("captured_0", "getitem"), ("captured_0", "getitem_1")),
                *(("captured_2", "wait_tensor_default_1"), ("captured_2", "wait_tensor_default")),
            ],
        ),
    ],
)
def test_each_result_is_waited_for_where_it_was_started(fn, waits):
    unsafe = ("aten::tanh", *(["_c10d_functional::all_reduce"] if fn is started_eagerly else []))
    gm = joined(fn, (4,), unsafe=unsafe)
    assert waits_of(gm) == waits
    if fn is returned:
        assert (
            gm.graph.output_node().args[0][0].target
            is torch.ops._c10d_functional.wait_tensor.default
        )


def test_simulated_recordings_communicate_with_nobody():
    def waits(args):
        return [collectives.wait_tensor(collectives.all_reduce(args[0] * 2, "sum", GROUP))]

    driver, x = SimulatedDriver(), torch.ones(4)
    for opaque in (False, True):
        graph, (out,) = driver.record(waits, [x], opaque=opaque)  # nobody is there to reduce with
        assert out.shape == x.shape
        graph.reset()
