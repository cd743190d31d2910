"""What partitions of tensor-parallel and sharded training look like, on CUDA's fake tensors."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.passes import graph_passes
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.split_joint import split_joint
from cgpass.options import Options
from tests.graphs import CUDA, joint_graph

if torch_private.wait_tensor() is None:
    pytest.skip("no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("cuda", [0, 1])
    torch.distributed.destroy_process_group()


def partitioned(fn, *specs, collectives=True, **options):
    """Forward and backward graph, cut."""
    joint = joint_graph(fn, *specs)
    graphs = split_joint(joint.gm, joint.inputs, compiler="eager", **joint.kwargs)
    passes = graph_passes(Options(min_partition_ops=1, **options), collectives=collectives)
    for gm, direction in zip(graphs, ("forward", "backward"), strict=True):
        drop_what_versions_differ_in(gm)
        run_passes(passes, gm, PassContext(CUDA, "graph", direction))
    return graphs


def drop_what_versions_differ_in(gm):
    """Views that change nothing, and transposes of transposes."""
    for node in [node for node in gm.graph.nodes if node.op == "call_function"]:
        source = node.args[0] if node.args else None
        if node.target is aten.t.default and source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
        elif node.target is aten.detach.default or (
            node.target is aten.view.default and node.meta["val"].shape == source.meta["val"].shape
        ):
            node.replace_all_uses_with(source)
    dropped = (aten.view.default, aten.t.default, aten.detach.default)
    gm.graph.eliminate_dead_code(lambda node: node.target not in dropped)


def text(gm):
    """A line for each operator, with names of their own: versions number them differently."""
    names, lines, counts = {}, [], {}
    for node in gm.graph.nodes:
        if node.op == "output":
            found = [value for value in node.args[0] if value is not None]
            lines.append(f"return {', '.join(names[value] for value in found)}")
        elif isinstance(node.meta["val"], torch.Tensor):  # else it is a mesh
            op = "input" if node.op == "placeholder" else node.target._opname
            counts[op] = counts.get(op, 0) + 1
            names[node] = f"{op}_{counts[op]}"
            if node.op == "call_function":
                given = ", ".join(names.get(arg, str(arg)) for arg in node.args)
                size = list(node.meta["val"].shape)
                lines.append(f"{get_tag(node)}: {names[node]} {size} = ({given})")
    return "\n".join(lines)


def of_collectives(gm):
    """Partition and name of each collective, in order."""
    found = filter(values.is_collective, gm.graph.nodes)
    return [f"{get_tag(node)}: {node.target._opname}" for node in found]


def tensor_parallel(mesh):
    def fn(x, up, down):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        up = DTensor.from_local(up, mesh, [Shard(0)], run_check=False)
        down = DTensor.from_local(down, mesh, [Shard(1)], run_check=False)
        y = F.linear(F.relu(F.linear(x, up)), down)
        return y.redistribute(mesh, [Replicate()]).to_local()

    return fn, (2, 4), (8, 4), (4, 8)


def sharded(mesh, around=lambda gather, w: gather(w)):
    def gather(w):
        w = DTensor.from_local(w, mesh, [Shard(0)], run_check=False)
        return w.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial("avg")])

    def fn(x, up, down):
        return F.linear(F.relu(F.linear(x, around(gather, up))), around(gather, down))

    return fn, (2, 4), (4, 4), (2, 8)


def gather_again():
    def policy(ctx, op, *args, **kwargs):
        again = op.namespace == "_c10d_functional" or op is aten.view.default
        return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def resharded(gather, w):
    return checkpoint(gather, w, use_reentrant=False, context_fn=gather_again)


def test_partitions_around_an_eager_operator_have_their_collectives(mesh):
    forward, backward = partitioned(*tensor_parallel(mesh), unsafe_ops=("aten::relu",))
    assert_expected_inline(
        text(forward),
        """\
captured_0: t_1 [4, 8] = (input_2)
captured_0: mm_1 [2, 8] = (input_1, t_1)
eager_1: relu_1 [2, 8] = (mm_1)
captured_2: t_2 [8, 4] = (input_3)
captured_2: mm_2 [2, 4] = (relu_1, t_2)
captured_2: all_reduce_1 [2, 4] = (mm_2, sum, 0)
captured_2: wait_tensor_1 [2, 4] = (all_reduce_1)
return wait_tensor_1, input_1, relu_1, input_3, input_2""",
    )
    assert of_collectives(backward) == ["captured_0: all_reduce", "captured_0: wait_tensor"]


def test_sharded_parameters_are_gathered_and_gradients_scattered_in_the_graphs(mesh):
    forward, backward = partitioned(*sharded(mesh))
    gathers = ["captured_0: all_gather_into_tensor", "captured_0: wait_tensor"]
    assert of_collectives(forward) == [*gathers, *gathers]
    assert_expected_inline(
        text(backward),
        """\
captured_0: t_1 [4, 2] = (input_5)
captured_0: mm_1 [4, 8] = (t_1, input_2)
captured_0: mm_2 [2, 8] = (input_5, input_3)
captured_0: reduce_scatter_tensor_1 [2, 8] = (mm_1, avg, 2, 0)
captured_0: wait_tensor_1 [2, 8] = (reduce_scatter_tensor_1)
captured_0: threshold_backward_1 [2, 8] = (mm_2, input_2, 0)
captured_0: t_2 [8, 2] = (threshold_backward_1)
captured_0: mm_3 [8, 4] = (t_2, input_1)
captured_0: mm_4 [2, 4] = (threshold_backward_1, input_4)
captured_0: reduce_scatter_tensor_2 [4, 4] = (mm_3, avg, 2, 0)
captured_0: wait_tensor_2 [4, 4] = (reduce_scatter_tensor_2)
return wait_tensor_2, mm_4, wait_tensor_1""",
    )


def test_what_is_sharded_again_after_the_forward_is_gathered_again_in_the_backward(mesh):
    _, backward = partitioned(*sharded(mesh, resharded))
    gathers = backward.graph.find_nodes(
        op="call_function", target=collectives.all_gather_into_tensor.default
    )
    assert [str(get_tag(node)) for node in gathers] == ["captured_0"] * 2


def sharded_otherwise(mesh):
    def fn(x, w):
        x = DTensor.from_local(x.relu(), mesh, [Shard(0)], run_check=False)
        return F.linear(x.redistribute(mesh, [Shard(1)]).to_local(), w)

    return fn, (4, 8), (3, 4)


def test_one_sharded_dimension_is_exchanged_for_another_in_the_graphs(mesh):
    forward, backward = partitioned(*sharded_otherwise(mesh))
    assert of_collectives(forward) == of_collectives(backward)
    assert of_collectives(backward) == ["captured_0: shard_dim_alltoall"]
    forward, _ = partitioned(*sharded_otherwise(mesh), collectives=False)
    assert of_collectives(forward) == ["eager_1: shard_dim_alltoall"]


def test_collectives_that_may_not_be_captured_lie_between(mesh):
    forward, backward = partitioned(*tensor_parallel(mesh), collectives=False)
    assert of_collectives(forward) == ["eager_1: all_reduce", "eager_1: wait_tensor"]
    assert of_collectives(backward) == ["eager_1: all_reduce", "eager_1: wait_tensor"]
