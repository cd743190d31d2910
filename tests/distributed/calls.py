"""Calls of processes beside training: single collectives, captures by hand, verification."""

import contextlib
import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_reduce,
)

import cgpass
from tests.distributed.programs import WIDTH, collectives, train
from tests.operators import tagged


@torch.library.custom_op("several::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        x.sum().item()
    return x * 2


fragile.register_fake(torch.empty_like)


def groups_of_its_own(world):
    """Groups that overlap, one of them of a single process, and a group that is an input."""
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][world.rank]
    last = dist.new_group([dist.get_world_size() - 1, 0])

    def fn(x, group):
        y = all_reduce(x.sin(), "sum", pair).cos()
        z = all_reduce(y * 2, "max", alone).exp() + all_reduce(y, "sum", dist.group.WORLD)
        return all_reduce(z, "avg" if x.is_cuda else "sum", group).tanh()

    call = world.compile(fn)
    with torch.no_grad():
        results = [call(x, group).cpu() for x in world.randn(4, WIDTH) for group in (last, pair)]
    dist.barrier()
    return results


def waits_elsewhere(world):
    """A collective is started in one partition, and waited for in another one."""
    group = dist.group.WORLD.group_name

    def fn(x):
        y = (x * 2).sin().cos().exp()
        started = collectives.all_reduce(y, "sum", group)
        z = tagged((y + 1).sin().cos().tanh())
        return (collectives.wait_tensor(started) + z).sin().cos().tanh()

    call = world.compile(fn)
    with torch.no_grad():
        return [call(x).cpu() for x in world.randn(4, WIDTH)]


def returned_unwaited(world):
    group = dist.group.WORLD.group_name

    def fn(x):
        y = (x * 2).sin().cos().exp()
        return collectives.all_reduce(y, "sum", group), y.tanh()

    call = world.compile(fn)
    with torch.no_grad():
        results = [call(x) for x in world.randn(4, WIDTH)]
        return [
            t.cpu() for first, second in results for t in (collectives.wait_tensor(first), second)
        ]


def one_rank_fails(world):
    """One process can't capture what the other one captures."""
    group = dist.group.WORLD.group_name

    def fn(x):
        y = (x * 2).sin().cos().exp()
        y = collectives.wait_tensor(collectives.all_reduce(y, "sum", group))
        y = fragile(y).sin()
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", group)).cos()

    call = world.compile(fn)
    with torch.no_grad():
        return [call(x).cpu() for x in world.randn(4, WIDTH)]


def one_rank_is_late(world):
    """A process that waits too long gets torch's own error; its next call finds the other process again."""
    group = dist.new_group()  # with a while to meet in
    for backend in {group._get_backend(device) for device in group._device_types}:
        backend._set_default_timeout(datetime.timedelta(seconds=0.5))
    errors = []

    def fn(x):
        y = (x * 2).sin().cos().exp()
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", group.group_name)).tanh()

    call = world.compile(fn)
    with torch.no_grad():
        if world.rank == 0:
            try:
                call(*world.randn(4, WIDTH, count=1))
            except RuntimeError as error:
                errors.append(error)
        dist.barrier()
    if world.rank == 0 and world.options["driver"] != "none":
        assert len(errors) == 1
    return [torch.zeros(1)]


def other_shards(x):
    """DTensor's call on CUDA to go from one sharded dimension to another."""
    group = dist.group.WORLD.group_name
    return torch.ops._dtensor.shard_dim_alltoall((x * 2).sin().cos().exp(), 0, 1, group).sin()


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
    """One part communicates, one does not: only the latter is verified."""
    group = dist.group.WORLD

    def fn(x):
        y = tagged((x.sin() * 2).cos().exp())
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


def by_hand(world, fn):
    """`fn(x, own)` captured by itself, where graphs are asked for."""
    if world.options["driver"] == "none":
        return fn
    return cgpass.CUDAGraphWrapper(fn, options={"driver": world.options["driver"]})


def wrapped(world, exchange):
    """One process records again and again, and replays as the other one does."""

    def fn(x, own):
        return exchange((x * (world.rank + 1)).sin()) + (own.sin() * 2).sum()

    call = by_hand(world, fn)
    with torch.no_grad():
        return [
            call(x, x.new_ones(2 + (world.rank * number // 2) % 2)).cpu()
            for number, x in enumerate(world.randn(4, WIDTH))
        ]


def wrapped_in_place(world):
    def exchange(x):
        y, gathered = x.clone(), x.new_empty(2 * len(x), WIDTH)
        dist.all_reduce(y)
        dist.all_gather_into_tensor(gathered, y + x)
        several = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(several, gathered[len(x) :] + y)
        dist.all_to_all_single(gathered, gathered + torch.cat(several))
        work = dist.broadcast(y, 1, async_op=True)
        work.wait()
        functional = all_reduce(y * 2, "sum", dist.group.WORLD).view(-1).reshape(x.shape)
        return gathered.chunk(2)[1 - world.rank] + y + functional

    return wrapped(world, exchange)


def wrapped_exchange(world):
    """Both send before they receive; on CPU they reduce in two groups in orders of their own."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = (1, 0) if world.rank == 0 and world.device.type == "cpu" else (0, 1)

    def exchange(x):
        padded, other = torch.cat([x, x[:1]]), 1 - world.rank  # a row of the other's comes last
        got, both = padded[-1], [(dist.isend, padded[0]), (dist.irecv, padded[-1])]
        for work in dist.batch_isend_irecv([dist.P2POp(op, row, other) for op, row in both]):
            work.wait()
        sums = [x.cos(), got.new_ones(4)]
        for work in [dist.all_reduce(sums[i], group=groups[i], async_op=True) for i in order]:
            work.wait()
        return got.cos() + x + sums[0] * sums[1].sum()

    return wrapped(world, exchange)


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class InPlace(nn.Module):
    """Tensor-parallel as of old."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.down(Reduced.apply(self.up(x).relu()))


def graphed_in_place(world):
    torch.manual_seed(world.rank)
    module = InPlace().to(world.device)
    call, driver = module, world.options["driver"]
    if driver != "none":
        sample = (world.randn(8, WIDTH, count=1)[0],)
        options = cgpass.GraphedOptions(driver=driver)
        call = cgpass.make_graphed_callables(module, sample, options=options)
    return train(world, module, call)


CALLS: dict[str, Callable] = {
    each.__name__: each
    for each in (
        groups_of_its_own,
        waits_elsewhere,
        returned_unwaited,
        one_rank_fails,
        one_rank_is_late,
        one_rank_records_again,
        verified_by_all,
        verified_by_one,
        wrapped_in_place,
        wrapped_exchange,
        graphed_in_place,
    )
}
