"""What processes call beside training: single collectives, captures by hand, verification."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import cgpass
from tests.distributed.programs import WIDTH, apart, fragile


def other_shards(x):
    """What DTensor calls on CUDA to go from one sharded dimension to another."""
    group = dist.group.WORLD.group_name
    return torch.ops._dtensor.shard_dim_alltoall((x * 2).sin().cos().exp(), 0, 1, group).sin()


def shards_of_another_dimension(world):
    call = world.compile(lambda x: other_shards(x).cos() * 2)
    with torch.no_grad():
        return [call(x).cpu() for x in world.randn(4, WIDTH)]


def one_rank_fails_with_shards(world):
    call = world.compile(lambda x: fragile(other_shards(x)).cos() * 2)
    with torch.no_grad():
        return [call(x).cpu() for x in world.randn(4, WIDTH)]


def one_rank_records_again(world):
    """Shapes of one process change, and not those of what is exchanged."""

    def fn(x, own):
        return other_shards(x) + (own.sin() * 2).sum()

    call = world.compile(fn, dynamic=True)
    with torch.no_grad():
        return [
            call(x, x.new_ones(2 + (world.rank * number) % 3)).cpu()
            for number, x in enumerate(world.randn(4, WIDTH))
        ]


def verified(world, verifies):
    """What communicates, and what does not: only the latter is verified."""
    group = dist.group.WORLD

    def fn(x):
        y = apart((x.sin() * 2).cos().exp())
        return all_reduce(y.sin().sum(0), "sum", group).cos() * 2

    call, results = world.compile(fn, dynamic=True), []
    with torch.no_grad(), cgpass.verify() if verifies else contextlib.nullcontext() as verification:
        for number, x in enumerate(world.randn(8, WIDTH)):
            # What one process replays, the other may not: there the shape is new.
            results.append(call(x[: 2 + number // 2 * world.rank]).cpu())
    if verifies and world.options["driver"] != "none":
        assert verification.checked > 0
    return results


def verified_by_all(world):
    return verified(world, verifies=True)


def verified_by_one(world):
    return verified(world, verifies=world.rank == 0)


CALLS: dict[str, Callable] = {
    each.__name__: each
    for each in (
        shards_of_another_dimension,
        one_rank_fails_with_shards,
        one_rank_records_again,
        verified_by_all,
        verified_by_one,
    )
}
