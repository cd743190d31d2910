"""What processes call beside training: single collectives, captures by hand, verification."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.distributed.programs import WIDTH, fragile


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


CALLS: dict[str, Callable] = {
    each.__name__: each
    for each in (
        shards_of_another_dimension,
        one_rank_fails_with_shards,
        one_rank_records_again,
    )
}
