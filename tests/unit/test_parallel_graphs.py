"""What partitions of tensor-parallel and sharded training look like, on CUDA's fake tensors."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cgpass.compile.facts.partition_tag import get_tag
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.join_collectives import JoinCollectives
from cgpass.compile.passes.lift_cpu_scalars import LiftCpuScalars
from cgpass.compile.passes.partition import Partition
from cgpass.compile.passes.rng_pairs import split_joint
from tests.graphs import CUDA, joint_graph

if not torch.distributed.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("cuda", [0, 1])
    torch.distributed.destroy_process_group()


def partitioned(fn, *specs, collectives=True, **options):
    """Forward and backward graph, cut."""
    joint = joint_graph(fn, *specs)
    graphs = split_joint(joint.gm, joint.inputs, compiler="eager", **joint.kwargs)
    unsafe = frozenset(options.get("unsafe_ops", ()))
    cutting = Partition(unsafe, min_partition_ops=1, collectives=collectives)
    passes = LiftCpuScalars(), cutting, JoinCollectives()
    for gm, direction in zip(graphs, ("forward", "backward"), strict=True):
        run_passes(passes, gm, PassContext(CUDA, "graph", direction))
    return graphs


def found(gm):
    """Operators of each partition, in their order, without views."""
    called = [node for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    kept = [n for n in called if n.target._opname not in ("view", "t", "detach")]
    groups = itertools.groupby(kept, key=get_tag)
    return [
        f"{str(tag).split('_')[0]}: {' '.join(n.target._opname for n in nodes)}"
        for tag, nodes in groups
    ]


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


def sharded_otherwise(mesh):
    def fn(x, w):
        x = DTensor.from_local(x.relu(), mesh, [Shard(0)], run_check=False)
        return F.linear(x.redistribute(mesh, [Shard(1)]).to_local(), w)

    return fn, (4, 8), (3, 4)


GATHER, REDUCE = "all_gather_into_tensor wait_tensor", "all_reduce wait_tensor"
SCATTER = "reduce_scatter_tensor wait_tensor"
BETWEEN = {"collectives": False}


@pytest.mark.parametrize(
    ("make", "options", "forward", "backward"),
    [
        (
            tensor_parallel,
            {"unsafe_ops": ("aten::relu",)},
            ["captured: mm", "eager: relu", f"captured: mm {REDUCE}"],
            [f"captured: mm mm threshold_backward mm mm {REDUCE}"],
        ),
        (
            tensor_parallel,
            BETWEEN,
            ["captured: mm relu mm", f"eager: {REDUCE}"],
            ["captured: mm mm threshold_backward mm mm", f"eager: {REDUCE}"],
        ),
        (
            sharded,
            {},
            [f"captured: {GATHER} mm relu {GATHER} mm"],
            [f"captured: mm mm {SCATTER} threshold_backward mm mm {SCATTER}"],
        ),
        (
            lambda mesh: sharded(mesh, resharded),
            {},
            [f"captured: {GATHER} mm relu {GATHER} mm"],
            [f"captured: mm {GATHER} mm {SCATTER} threshold_backward mm {GATHER} mm {SCATTER}"],
        ),
        (
            sharded_otherwise,
            {},
            ["captured: relu shard_dim_alltoall mm"],
            ["captured: mm mm shard_dim_alltoall threshold_backward"],
        ),
        (
            sharded_otherwise,
            BETWEEN,
            ["captured: relu", "eager: shard_dim_alltoall", "captured: mm"],
            ["captured: mm mm", "eager: shard_dim_alltoall", "captured: threshold_backward"],
        ),
    ],
)
def test_where_collectives_run(mesh, make, options, forward, backward):
    """What is sharded again after the forward is gathered again in the backward."""
    assert [found(gm) for gm in partitioned(*make(mesh), **options)] == [forward, backward]
