"""Training on several devices: what each process runs, with and without graphs."""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cgpass
from cgpass.runtime import fast
from cgpass.runtime import owner as owners

WIDTH = 16
STEPS = 10 if torch.cuda.is_available() else 6
STEPS_UNTIL_STEADY = 24
"""Steps with parameters that come back: on CPU they never lie where they lay."""
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
    """A process's view of the others."""

    mesh: object
    device: torch.device
    options: dict

    @property
    def rank(self):
        return dist.get_rank()

    def compile(self, fn, **how):
        return torch.compile(fn, backend=cgpass.cgpass, options=self.options, **how)

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


def train(world, module, call, *, same=False, context=contextlib.nullcontext, steps=STEPS):
    """Losses and parameters."""
    # Not for each: torch 2.11 takes no mixture of DTensors and others.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    losses = []
    for x in world.randn(8, WIDTH, same=same, count=steps):
        with context():
            loss = call(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *map(whole, module.parameters())]


def split_layers(module, mesh):
    for layer in module.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def tensor_parallel(world):
    module = split_layers(world.net(), world.mesh)
    return train(world, module, world.compile(module), same=True)


class Loss(nn.Module):
    """A network whose classes are spread over the devices, with its loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        labels = torch.arange(len(x), device=x.device) % 4
        return F.cross_entropy(self.net(x), labels)


def collectives_between_graphs(world):
    """As where they may not be captured."""
    with mock.patch("cgpass.compile.assembly.may_be_captured", return_value=False):
        return tensor_parallel(world)


def parallel_loss(world):
    """No device sees all classes' logits."""
    module = split_layers(world.net(), world.mesh)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, world.mesh, {"head": head})
    call = world.compile(Loss(module))
    return train(world, module, call, same=True, context=loss_parallel)


class Gathered(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, parameter):
        full = parameter.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)
        return full.to_local(grad_placements=[Partial("avg")] * self.mesh.ndim)


def simple_fsdp(world, gathered=Gathered, check=lambda: None):
    """Parameters are sharded, and gathered in the graph."""
    module = world.net()
    for each in list(module.modules()):
        for name, parameter in list(each.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), world.mesh, [Shard(0)] * world.mesh.ndim)
            each.register_parameter(name, nn.Parameter(shards))
            parametrize.register_parametrization(each, name, gathered(world.mesh), unsafe=True)
    call = world.compile(module)
    results = train(world, module, call)
    check()
    return results


GATHERING = {
    collectives.all_gather_into_tensor.default,
    collectives.wait_tensor.default,
    torch.ops.aten.view.default,
    torch.ops.aten.slice.Tensor,
}


def gather_again():
    """A policy that keeps nothing of what is gathered for the backward."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE if op in GATHERING else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


class GatheredTwice(Gathered):
    """Sharded again after the forward, as the user's policy asks for."""

    def forward(self, parameter):
        gather = super().forward
        return checkpoint(gather, parameter, use_reentrant=False, context_fn=gather_again)


def recordings():
    """All recordings of this process."""
    return [recording for owner in list(owners._owners) for recording in owner._recordings()]


def calls_recorded(name):
    """Calls of an operator in all recordings; of CUDA's own they are not kept."""
    tapes = [recording.graph._calls for recording in recordings()]
    return sum(name in str(func) for tape in tapes for func, *_ in tape)


def simple_fsdp_resharding(world):
    """The backward gathers again what the forward did, in its graph."""

    def check():
        if world.options["driver"] == "simulated":
            assert calls_recorded("all_gather_into_tensor") > len(list(Net().parameters()))

    return simple_fsdp(world, GatheredTwice, check)


def fsdp_blocks(world):
    module = world.net()
    for layer in module.layers:
        world.compile_in_place(layer)
        fully_shard(layer, mesh=world.mesh)
    fully_shard(module, mesh=world.mesh)
    return train(world, module, module, steps=STEPS_UNTIL_STEADY)


class CachingAllocator:
    """Storages that FSDP frees and allocates again, with memory as CUDA's allocator gives it: the lowest that fits."""

    def __init__(self):
        self.free, self.used = {}, {}

    def allocate(self, tensor):
        storage, size = tensor.untyped_storage(), tensor.nbytes
        if storage.size() != size:
            storage.resize_(size)
            blocks = self.free.setdefault(size, [])
            blocks.sort(key=torch.Tensor.data_ptr)
            block = blocks.pop(0) if blocks else torch.empty(size, dtype=torch.uint8)
            self.used[storage._cdata] = block
            fast.swap_storages([tensor], [block])

    def release(self, tensor):
        storage = tensor.untyped_storage()
        if storage.size():
            block = self.used.pop(storage._cdata, None)
            if block is not None:
                fast.swap_storages([tensor], [block])  # which holds what it was resized to
                self.free[block.nbytes].append(block)
            storage.resize_(0)


def fsdp_blocks_that_come_back(world):
    """As on CUDA: a step allocates what the last one did, and so gets it where the last one did."""
    allocator = CachingAllocator()
    with (
        mock.patch.object(_fsdp_param, "alloc_storage", allocator.allocate),
        mock.patch.object(_fsdp_param, "free_storage", allocator.release),
    ):
        return fsdp_blocks(world)


def tensor_parallel_and_fsdp(world):
    """Two devices compute a layer, two hold it."""
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    module = split_layers(world.net(), mesh["tensor"])
    for layer in module.layers:
        world.compile_in_place(layer)
        fully_shard(layer, mesh=mesh["data"])
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, mesh["tensor"], {"head": head})
    fully_shard(module, mesh=mesh["data"])
    return train(world, module, module, same=True, steps=STEPS_UNTIL_STEADY // 2)


def simple_fsdp_in_two_dimensions(world):
    """Parameters are sharded over four devices, and gathered in two steps, each in its own group."""
    mesh = init_device_mesh(world.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    return simple_fsdp(dataclasses.replace(world, mesh=mesh))


class Experts(nn.Module):
    """One expert a process, and tokens sent to the expert that they choose."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, dist.get_world_size())
        self.expert, self.head = MLP(), nn.Linear(WIDTH, 4)

    def forward(self, x):
        weights, chosen = self.gate(self.norm(x)).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        experts = torch.arange(dist.get_world_size(), device=x.device)
        counts = (chosen[:, None] == experts).sum(0)
        coming = all_to_all_single(counts, None, None, dist.group.WORLD)
        sent, got = counts.tolist(), coming.tolist()
        tokens = all_to_all_single_autograd(x[order], got, sent, dist.group.WORLD)
        back = all_to_all_single_autograd(self.expert(tokens), sent, got, dist.group.WORLD)
        y = torch.zeros_like(x).index_copy(0, order, back) * weights[:, None]
        return self.head(F.gelu(x + y))


def expert_parallel(world):
    """Only the host knows the number of an expert's tokens: between graphs."""
    torch.manual_seed(0)
    module = Experts().to(world.device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return train(world, module, world.compile(module))


def data_parallel(world):
    module = nn.parallel.DistributedDataParallel(world.net())
    return train(world, module, world.compile(module))


def data_parallel_step(world):
    """A whole step is none here: each call runs in pieces, for one reason."""
    module = nn.parallel.DistributedDataParallel(world.net())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    step = cgpass.train_step(
        lambda x: module(x).square().mean(), optimizer, max_norm=1.0, options=world.options
    )
    losses = [step(x).cpu() for x in world.randn(8, WIDTH)]
    assert step.whole_calls == 0, step.explain()
    assert len(step.in_pieces) == 1, step.explain()
    return [*losses, step.grad_norm.cpu(), *map(whole, module.parameters())]


PROGRAMS: dict[str, Callable] = {
    each.__name__: each
    for each in (
        tensor_parallel,
        collectives_between_graphs,
        parallel_loss,
        simple_fsdp,
        simple_fsdp_resharding,
        fsdp_blocks,
        fsdp_blocks_that_come_back,
        data_parallel,
        data_parallel_step,
        expert_parallel,
        tensor_parallel_and_fsdp,
        simple_fsdp_in_two_dimensions,
    )
}
