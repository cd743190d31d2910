"""Each partition waits for the collectives that it starts."""

import pytest
import torch
from expecttest import assert_expected_inline

from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.passes.base import PassContext, graph_text, run_passes
from cgpass.compile.passes.partition import Partition, join_collectives
from cgpass.runtime.simulated import SimulatedDriver
from tests.graphs import CUDA, fake_cuda_graph

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
collectives = torch.ops._c10d_functional
GROUP = "0"


def joined(fn, *shapes, unsafe=("aten::tanh",)):
    gm = fake_cuda_graph(fn, *shapes)
    run_passes([Partition(frozenset(unsafe), 1)], gm, PassContext(CUDA, "graph", "forward"))
    once = graph_text(gm)
    join_collectives(gm)
    assert graph_text(gm) == once
    return gm


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


def waits_of(gm):
    """Waits: partition and value."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    return [(str(get_tag(n)), n.args[0].name) for n in gm.graph.nodes if n.target is wait]


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
