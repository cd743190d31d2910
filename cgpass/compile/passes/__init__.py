"""The passes of each stage, in order."""

from cgpass.compile.passes.base import Pass
from cgpass.compile.passes.join_collectives import JoinCollectives
from cgpass.compile.passes.lift_cpu_scalars import LiftCpuScalars
from cgpass.compile.passes.own_gradients import OwnGradients
from cgpass.compile.passes.partition import Partition
from cgpass.compile.passes.rng_pairs import FunctionalizeRng
from cgpass.options import Options


def rng_passes() -> tuple[Pass, ...]:
    """Return what every graph goes through, captured or not."""
    # On its own, since a graph that runs plainly must repeat its forward's numbers, too, and give gradients apart.
    return (OwnGradients(), FunctionalizeRng())


def graph_passes(options: Options, *, collectives: bool = True) -> tuple[Pass, ...]:
    """Return what a forward, backward or inference graph goes through; leaves it tagged."""
    return (
        # Before the partitions are cut, since what it moves to the device needs no boundary.
        LiftCpuScalars(aten_kernels=options.compiler == "eager"),
        # Whatever comes later has to keep the order and the tags.
        Partition(
            unsafe_ops=frozenset(options.unsafe_ops),
            min_partition_ops=options.min_partition_ops,
            collectives=collectives,
        ),
        # Then: only now it is known which waits lie elsewhere.
        JoinCollectives(),
    )
