"""Training on several devices, with what they tell each other inside of the graphs.

    torchrun --nproc-per-node 2 examples/train_distributed.py --mode tp|fsdp|simple-fsdp|ddp

On CUDA through NCCL; without a GPU through gloo, with simulated graphs. Half way the state is saved by
torch.distributed.checkpoint, thrown away and loaded again: what follows is what would have followed.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

import cgpass

ON_CUDA = torch.cuda.is_available()
WIDTH, LAYERS, STEPS = 32, 3, 12


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gathered(nn.Module):
    """Sees a sharded parameter as a whole one; its gradient is averaged and sharded."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, shards: Any) -> torch.Tensor:
        return shards.redistribute(self.mesh, [Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Each device computes a part of every layer; collectives are in the graph."""
    for block in model.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return torch.compile(model, backend="cgpass")


def fsdp(model: nn.Module, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Layers are gathered when they run, between graphs."""
    for block in model.children():
        block.compile(backend="cgpass")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Layers are gathered when they run, in the graph."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shards))
            parametrize.register_parametrization(module, name, Gathered(mesh), unsafe=True)
    return torch.compile(model, backend="cgpass")


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    """Gradients are averaged while the backward runs, between graphs."""
    del mesh
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="cgpass")


MODES = {
    "tp": tensor_parallel,
    "fsdp": fsdp,
    "simple-fsdp": simple_fsdp,
    "ddp": data_parallel,
}


def save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Save all state, spoil it, and load it again."""
    state, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": state, "optimizer": states}, checkpoint_id=directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state, states = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": states}
    checkpoint.load(loaded, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )


def train(mode: str, mesh: DeviceMesh, directory: str | None) -> list[float]:
    """Losses of this process; state is saved and loaded half way if there is a directory for it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(mesh.device_type)
    call = MODES[mode](model, mesh)
    # Not for each: torch 2.11 takes no mixture of DTensors and others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(0 if mode == "tp" else dist.get_rank())
    losses = []
    for step in range(STEPS):
        if directory is not None and step == STEPS // 2:
            save_and_load(model, optimizer, directory)
        x = torch.randn(8, WIDTH, generator=generator).to(mesh.device_type)
        loss = (call(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="tp")
    mode = parser.parse_args().mode
    if "RANK" not in os.environ:
        parser.error(
            f"run it as torchrun --nproc-per-node 2 examples/train_distributed.py --mode {mode}"
        )
    if ON_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cgpass.set_defaults(driver="simulated", compiler="eager")
    dist.init_process_group("nccl" if ON_CUDA else "gloo")
    mesh = init_device_mesh("cuda" if ON_CUDA else "cpu", (dist.get_world_size(),))
    told = dist.get_rank() == 0
    directories = [tempfile.mkdtemp() if told else ""]
    dist.broadcast_object_list(directories)
    losses = train(mode, mesh, directories[0])
    if told:
        for step, loss in enumerate(losses, 1):
            print(f"step {step}: loss {loss:.4f}")
        print(cgpass.summary())
    torch.compiler.reset()
    same = losses == train(mode, mesh, None)
    if told:
        print("losses with a checkpoint half way:", "the same" if same else "DIFFERENT")
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
