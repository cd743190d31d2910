"""Trains layers sharded by FSDP2 in two processes, and prints what each step recorded; to be run by its path.

    LD_PRELOAD=places.so python gathered_layers.py places.so own|shared FORWARDS

Memory lies where CUDA's caching allocator would put it, what FSDP2 gathers in a pool of its own or in the one of all.
Each step has so many forwards, and one backward.
"""

import contextlib
import ctypes
import json
import logging
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cgpass
from cgpass.runtime import gathered

LAYERS, STEPS, WIDTH = 18, 5, 160


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, scale):
        return x + 0.1 * self.down(nn.functional.gelu(self.up(self.norm(x))) * scale)


class Model(nn.Module):
    """All layers read one tensor that is new in each step, as rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        x = self.embed(x)
        scale = x[:1].detach().cos()
        for layer in self.layers:
            x = layer(x, scale)
        return x


def train(driver, forwards):
    """Losses, and what was counted after each step."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.compile(backend="cgpass", options={"driver": driver, "compiler": "eager"})
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, counted = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        batches = [torch.randn(2, 64, WIDTH, generator=generator) for _ in range(forwards)]
        loss = sum(model(batch).square().mean() for batch in batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counted.append(cgpass.counters())
    return losses, counted


def process(rank, library, pool, forwards, store, queue):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if pool == "own":
        select = ctypes.CDLL(library).select_places

        @contextlib.contextmanager
        def allocating(device):
            select(1)
            try:
                yield
            finally:
                select(0)

        gathered._allocating = allocating
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    init_device_mesh("cpu", (2,))
    plain, _ = train("none", forwards)
    torch.compiler.reset()
    before = cgpass.counters()
    losses, counted = train("simulated", forwards)
    names = ("recordings", "replays", "plain_calls", "warmups", "copied_bytes")
    steps = [{name: each[name] - before[name] for name in names} for each in counted]
    queue.put((rank, {"equal": losses == plain, "steps": steps}))
    dist.destroy_process_group()


def main():
    library, pool, forwards = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        args = (library, pool, int(forwards), f"{directory}/store", queue)
        ranks = [context.Process(target=process, args=(rank, *args)) for rank in range(2)]
        for each in ranks:
            each.start()
        found = dict(queue.get() for _ in ranks)
        for each in ranks:
            each.join()
    print(json.dumps([found[rank] for rank in sorted(found)]))  # noqa: T201


if __name__ == "__main__":
    main()
