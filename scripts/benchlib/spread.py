"""Ways to spread a transformer over the devices of this process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize


class Gathered(nn.Module):
    """Sees a sharded parameter as a whole one; its gradient is averaged and sharded."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, shards: Any) -> torch.Tensor:
        whole = shards.redistribute(self.mesh, [Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def _mesh(module: nn.Module) -> DeviceMesh:
    return init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))


def tensor_parallel(module: Any, settings: dict[str, Any]) -> Any:
    """Spread attention heads and hidden features."""
    ways = {"o_proj": RowwiseParallel, "down_proj": RowwiseParallel}
    for layer in module.model.model.layers:
        names = [name for name, _ in layer.named_modules() if name.endswith("_proj")]
        plan = {name: ways.get(name.rpartition(".")[2], ColwiseParallel)() for name in names}
        parallelize_module(layer, _mesh(module), plan)
    return torch.compile(module, **settings)


def fsdp2(module: Any, settings: dict[str, Any]) -> Any:
    """Shard layers with FSDP2, and compile each."""
    mesh = _mesh(module)
    for layer in module.model.model.layers:
        layer.compile(**settings)
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def simple_fsdp(module: Any, settings: dict[str, Any]) -> Any:
    """Shard all parameters, and gather them in the graph."""
    mesh = _mesh(module)
    for each in list(module.modules()):
        for name, parameter in list(each.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            each.register_parameter(name, nn.Parameter(shards))
            parametrize.register_parametrization(each, name, Gathered(mesh), unsafe=True)
    return torch.compile(module, **settings)
