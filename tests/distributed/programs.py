"""Training on several devices: what each process runs, with and without graphs."""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import parametrize

import cgpass

WIDTH = 16
STEPS = 10 if torch.cuda.is_available() else 6
collectives = torch.ops._c10d_functional


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclasses.dataclass
class World:
    """What a process knows of the others."""

    mesh: object
    device: torch.device
    options: dict

    @property
    def rank(self):
        return dist.get_rank()

    def compile(self, fn):
        return torch.compile(fn, backend=cgpass.cgpass, options=self.options)

    def compile_in_place(self, module):
        module.compile(backend=cgpass.cgpass, options=self.options)

    def net(self):
        torch.manual_seed(0)
        return Net().to(self.device)

    def randn(self, *size, same=False, count=STEPS):
        generator = torch.Generator().manual_seed(1 if same else 2 + self.rank)
        return [torch.randn(*size, generator=generator).to(self.device) for _ in range(count)]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def train(world, module, call, *, same=False, context=None):
    """Losses and parameters."""
    # Not for each: torch 2.11 takes no mixture of DTensors and others.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    losses = []
    for number, x in enumerate(world.randn(8, WIDTH, same=same)):
        with context(number) if context else torch.enable_grad():
            loss = call(x).float().square().mean()
            loss.backward()
        if context is None or number % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *map(whole, module.parameters())]


def tensor_parallel(world):
    module = world.net()
    for layer in module.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, world.mesh, plan)
    return train(world, module, world.compile(module), same=True)


class Gathered(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, parameter):
        full = parameter.redistribute(self.mesh, [Replicate()])
        return full.to_local(grad_placements=[Partial("avg")])


def simple_fsdp(world):
    """Parameters are sharded, and gathered in the graph."""
    module = world.net()
    for each in list(module.modules()):
        for name, parameter in list(each.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), world.mesh, [Shard(0)])
            each.register_parameter(name, nn.Parameter(shards))
            parametrize.register_parametrization(each, name, Gathered(world.mesh), unsafe=True)
    return train(world, module, world.compile(module))


def fsdp_blocks(world):
    module = world.net()
    for layer in module.layers:
        world.compile_in_place(layer)
        fully_shard(layer, mesh=world.mesh)
    fully_shard(module, mesh=world.mesh)
    return train(world, module, module)


def fsdp_whole(world):
    module = world.net()
    for layer in module.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(module, mesh=world.mesh)
    return train(world, module, world.compile(module))


def data_parallel(world):
    module = nn.parallel.DistributedDataParallel(world.net())
    return train(world, module, world.compile(module))


def data_parallel_accumulating(world):
    module = nn.parallel.DistributedDataParallel(world.net())

    def every_other(number):
        return contextlib.nullcontext() if number % 2 else module.no_sync()

    return train(world, module, world.compile(module), context=every_other)


@torch.library.custom_op("several::apart", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def apart(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("several::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        x.sum().item()
    return x * 2


apart.register_fake(torch.empty_like)
fragile.register_fake(torch.empty_like)


def waits_elsewhere(world):
    """A collective is started in one partition, and waited for in another one."""
    group = dist.group.WORLD.group_name

    def fn(x):
        y = (x * 2).sin().cos().exp()
        started = collectives.all_reduce(y, "sum", group)
        z = apart((y + 1).sin().cos().tanh())
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
    """What one process waits for too long is told as that, and the next call finds the other one again."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
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
        (error,) = errors
        assert isinstance(error, cgpass.errors.CollectiveTimeoutError), error
        assert "inference captured_0: a collective timed out while the partition ran" in str(error)
        assert "wait_tensor (of all_reduce) at programs.py:" in str(error)
        assert "in fn: return collectives.wait_tensor(" in str(error)
    return [torch.zeros(1)]


PROGRAMS: dict[str, Callable] = {
    each.__name__: each
    for each in (
        tensor_parallel,
        simple_fsdp,
        fsdp_blocks,
        fsdp_whole,
        data_parallel,
        data_parallel_accumulating,
        waits_elsewhere,
        returned_unwaited,
        one_rank_fails,
        one_rank_is_late,
    )
}
