"""Each partition waits for the collectives that it starts."""

import operator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

import cgpass
from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.join_collectives import JoinCollectives
from cgpass.compile.passes.partition import Partition
from cgpass.runtime.simulated import SimulatedDriver
from tests.graphs import CUDA, fake_cuda_graph

pytestmark = pytest.mark.skipif(torch_private.wait_tensor() is None, reason="no torch.distributed")
collectives = torch.ops._c10d_functional
GROUP = "0"


def joined(fn, *shapes, unsafe=("aten::tanh",)):
    gm = fake_cuda_graph(fn, *shapes)
    passes = (Partition(frozenset(unsafe), 1), JoinCollectives())
    return run_passes(passes, gm, PassContext(CUDA, "graph", "forward")).gm


def waited_elsewhere(x):
    y = x.sin()
    started = collectives.all_reduce(y, "sum", GROUP)
    between = y.tanh()
    return collectives.wait_tensor(started) + between


def test_what_another_partition_waits_for_is_waited_for_here_first():
    assert_expected_inline(
        graph_text(joined(waited_elsewhere, (4,))),
        """\
x_1: float32[4]@cuda = placeholder
sin: float32[4]@cuda = aten.sin.default(x_1)  # captured_0
all_reduce: float32[4]@cuda = _c10d_functional.all_reduce.default(sin, sum, 0)  # captured_0
wait_tensor_default: float32[4]@cuda = _c10d_functional.wait_tensor.default(all_reduce)  # captured_0
tanh: float32[4]@cuda = aten.tanh.default(sin)  # eager_1
wait_tensor: float32[4]@cuda = _c10d_functional.wait_tensor.default(wait_tensor_default)  # captured_2
add: float32[4]@cuda = aten.add.Tensor(wait_tensor, tanh)  # captured_2
return add""",
    )


def tags_of_waits(gm):
    return [
        (str(get_tag(node)), node.args[0].name)
        for node in gm.graph.nodes
        if node.target is torch_private.wait_tensor()
    ]


def test_a_wait_stays_where_it_is():
    def fn(x):
        started = collectives.all_reduce(x.sin(), "sum", GROUP)
        y = x.cos()
        return collectives.wait_tensor(started) + y.tanh()

    gm = joined(fn, (4,))
    assert tags_of_waits(gm) == [("captured_0", "all_reduce")]
    names = [node.name for node in gm.graph.nodes]
    assert names.index("cos") < names.index("wait_tensor")


def test_an_eager_partition_joins_too():
    def fn(x):
        started = collectives.all_reduce(x.tanh(), "sum", GROUP)
        return collectives.wait_tensor(started).sin()

    gm = joined(fn, (4,), unsafe=("aten::tanh", "_c10d_functional::all_reduce"))
    assert tags_of_waits(gm)[0] == ("eager_0", "all_reduce")


def test_results_that_are_returned_and_lists_of_them():
    def fn(x, y):
        first, second = collectives.all_gather_into_tensor_coalesced([x.sin(), y.cos()], 2, GROUP)
        return first, collectives.wait_tensor(second).exp(), x.tanh()

    gm = joined(fn, (4,), (4,))
    gathered = next(node for node in gm.graph.nodes if values.starts_collective(node))
    results = [user for user in gathered.users if user.target is operator.getitem]
    assert len(results) == 2
    assert all(any(u.target is torch_private.wait_tensor() for u in r.users) for r in results)
    returned = gm.graph.output_node().args[0][0]
    assert returned.target is torch_private.wait_tensor()


def test_a_result_that_nobody_reads_is_joined_too():
    def fn(x):
        first, _ = collectives.all_reduce_coalesced([x.sin(), x.cos()], "sum", GROUP)
        return collectives.wait_tensor(first).exp()

    gm = joined(fn, (4,))
    started = next(node for node in gm.graph.nodes if values.starts_collective(node))
    results = [user for user in started.users if user.target is operator.getitem]
    assert sorted(result.args[1] for result in results) == [0, 1]
    assert all(any(u.target is torch_private.wait_tensor() for u in r.users) for r in results)


@pytest.mark.parametrize("fn", [waited_elsewhere, lambda x: x.sin().tanh().cos()])
def test_nothing_is_done_twice_or_without_collectives(fn):
    gm = joined(fn, (4,))
    before = graph_text(gm)
    result = run_passes((JoinCollectives(),), gm, PassContext(CUDA, "graph", "forward"))
    assert not result.modified
    assert graph_text(gm) == before


def test_simulated_recordings_communicate_with_nobody():
    def waits(args):
        return [collectives.wait_tensor(collectives.all_reduce(args[0] * 2, "sum", GROUP))]

    driver, x = SimulatedDriver(), torch.ones(4)
    for opaque in (False, True):
        graph, (out,) = driver.record(waits, [x], opaque=opaque)  # nobody is there to reduce with
        assert out.shape == x.shape
        graph.reset()


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_collectives_in_place_are_so_in_replays(alone):
    def fn(x):
        y = x * 2
        same = collectives.wait_tensor(collectives.all_reduce_(y, "sum", alone))
        return y + 1, same.sin()

    wrapper = cgpass.CUDAGraphWrapper(fn, options={"driver": "simulated"})
    for _ in range(4):
        x = torch.randn(8)
        found = wrapper(x)
        assert torch.equal(found[0], x * 2 + 1)
        assert torch.equal(found[1], (x * 2).sin())
    assert wrapper.stats.replays >= 2
