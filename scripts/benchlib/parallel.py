"""Training steps of the Llama on several devices: ways to spread it, arms, and what ends while graphs are alive."""

from __future__ import annotations

import hashlib
import statistics
import time
from typing import TYPE_CHECKING, Any

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
from torch.nn.utils import parametrize

import cgpass
from benchlib import arms, models
from cgpass.runtime import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

ARMS = ("default", "reduce-overhead", "cgpass")


class Gathered(nn.Module):
    """Sees a sharded parameter as a whole one; its gradient is averaged and sharded."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, shards: Any) -> torch.Tensor:
        return shards.redistribute(self.mesh, [Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> Any:
    """Attention heads and hidden features are spread."""
    ways = {"o_proj": RowwiseParallel, "down_proj": RowwiseParallel}
    for layer in module.model.model.layers:
        names = [name for name, _ in layer.named_modules() if name.endswith("_proj")]
        plan = {name: ways.get(name.rpartition(".")[2], ColwiseParallel)() for name in names}
        parallelize_module(layer, mesh, plan)
    return torch.compile(module, **settings)


def fsdp(module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> Any:
    """FSDP2, with compiled layers."""
    for layer in module.model.model.layers:
        layer.compile(**settings)
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def simple_fsdp(module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> Any:
    """Parameters are gathered in the graph."""
    for each in list(module.modules()):
        for name, parameter in list(each.named_parameters(recurse=False)):
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            each.register_parameter(name, nn.Parameter(shards))
            parametrize.register_parametrization(each, name, Gathered(mesh), unsafe=True)
    return torch.compile(module, **settings)


MODES: dict[str, Callable[[nn.Module, DeviceMesh, dict[str, Any]], Any]] = {
    "tensor parallel": tensor_parallel,
    "FSDP2": fsdp,
    "SimpleFSDP": simple_fsdp,
}


def settings_of(arm: str, device: torch.device) -> dict[str, Any]:
    """What `torch.compile` is called with.

    Raises:
        RuntimeError: The arm needs a CUDA device.
    """
    settings = arms.compile_settings(arm, device) or {}
    if device.type == "cuda":
        return settings
    if arm == "reduce-overhead":
        raise RuntimeError("CUDA graphs of torch need a CUDA device")
    if arm == "default":  # kernels for the CPU are not what is measured
        return {"backend": "aot_eager"}
    return settings | {"options": settings["options"] | {"compiler": "eager"}}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class Training:
    """A model that is spread over the devices, with its optimizers and batches."""

    def __init__(self, mode: str, arm: str, mesh: DeviceMesh, *, tiny: bool) -> None:
        self.device = torch.device(
            mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None
        )
        settings = settings_of(arm, self.device)
        spec = models.SPECS["llama"]
        torch.manual_seed(0)
        self.module = spec.build(tiny).to(self.device).train()
        self._marks_steps = arm == "reduce-overhead"
        self._call = MODES[mode](self.module, mesh, settings)
        seed = 1 if mode == "tensor parallel" else 1 + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        made = [spec.batch(generator, tiny) for _ in range(models.NUM_BATCHES)]
        self.batches = [{k: v.to(self.device) for k, v in batch.items()} for batch in made]
        self.losses: list[torch.Tensor] = []
        spread = [p for p in self.module.parameters() if isinstance(p, DTensor)]
        others = [p for p in self.module.parameters() if not isinstance(p, DTensor)]
        self._optimizers = [
            torch.optim.AdamW(group, lr=1e-4, fused=self.device.type == "cuda")
            for group in (spread, others)  # torch 2.11 takes no mixture
            if group
        ]
        if arm.startswith("cgpass"):
            native.loader.wait()

    def step(self) -> float:
        """One step; milliseconds until the device is done."""
        self._synchronise()
        start = time.perf_counter()
        if self._marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch = self.batches[len(self.losses) % len(self.batches)]
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self._call(**batch)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._synchronise()
        ms = (time.perf_counter() - start) * 1e3
        self.losses.append(loss.detach().clone())
        return ms

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def state(self) -> list[str]:
        """What tells the bits of losses and of this device's part of the parameters from others."""
        parameters = [
            (p.to_local() if isinstance(p, DTensor) else p).detach()
            for p in self.module.parameters()
        ]
        return [_digest(each) for each in (*self.losses, *parameters)]


def spread_ms(times: list[float]) -> dict[str, float]:
    """Median and tenths."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {
        "median": round(statistics.median(ordered), 4),
        "p10": round(ordered[tenth], 4),
        "p90": round(ordered[-1 - tenth], 4),
    }


def start_group(device_type: str, store: dist.Store, rank: int, processes: int) -> None:
    """Starts the process group of all."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)


def capture_and_end(
    device_type: str, store: dist.Store, rank: int, processes: int, times: int
) -> list[float]:
    """Ends process groups, again and again, while graphs hold their work; milliseconds of each."""
    found = []
    for number in range(times):
        # Keys of its own: a process that is early would meet what another is about to end.
        start_group(device_type, dist.PrefixStore(str(number), store), rank, processes)
        group = dist.group.WORLD.group_name
        driver = "auto" if device_type == "cuda" else "simulated"

        def fn(x: torch.Tensor, group: str = group) -> torch.Tensor:
            y = (x * 2).sin().cos().exp()
            started = torch.ops._c10d_functional.all_reduce(y, "sum", group)
            return torch.ops._c10d_functional.wait_tensor(started).tanh()

        torch.compiler.reset()
        options = {"driver": driver, "compiler": "eager"}
        call = torch.compile(fn, backend=cgpass.cgpass, options=options)
        x = torch.ones(4, 16, device=device_type)
        with torch.no_grad():
            for _ in range(3):
                y = call(x)
        y.sum().item()
        if cgpass.counters()["recordings"] <= number:
            raise RuntimeError("nothing was captured")
        start = time.perf_counter()
        dist.destroy_process_group()
        found.append(round((time.perf_counter() - start) * 1e3, 1))
        del call
    return found
