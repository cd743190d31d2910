"""Measures recomputation on a CUDA device: what random operators in checkpoints cost, and what checkpoints save.

    python scripts/bench_recompute.py --json recompute.json

pairs   forward and backward of a stack of checkpointed attentions with dropout, each of which draws once in the forward
        and again in the backward; arms interleaved in one process. The same stack without dropout shows what of the
        time is not due to random numbers.
memory  peak allocated bytes of a training step of transformer blocks, with and without checkpoints, plainly, compiled
        and captured by hand.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchlib import arguments, meta
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cgpass

DEVICE = torch.device("cuda", 0)
torch._dynamo.config.recompile_limit = 64
Step = Callable[[], None]


class Attentions(nn.Module):
    """Checkpointed attentions, one after the other."""

    def __init__(self, depth: int, dropout: float, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = dropout

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = layer(x).view(*x.shape[:2], 1, x.shape[2]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)
        return x + mixed.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.part, layer, x, use_reentrant=False)
        return x


def compiled(module: nn.Module, arm: str) -> Callable[..., torch.Tensor]:
    """The module as an arm calls it."""
    if arm == "reduce-overhead":
        return torch.compile(module, mode="reduce-overhead", dynamic=False)
    if arm == "cudagraphs":
        return torch.compile(module, backend="cudagraphs", dynamic=False)
    if arm == "default":
        return torch.compile(module, dynamic=False)
    compiler, _, rng = arm.removeprefix("cgpass-").partition("-")
    options = {"compiler": compiler, "rng": rng or "exact"}
    return torch.compile(module, backend=cgpass.cgpass, options=options, dynamic=False)


def attention_step(arm: str, depth: int, dropout: float) -> Callable[[], tuple[float, float]]:
    """A step of one arm; gives host milliseconds of forward and backward, and of all until the device is done."""
    torch.manual_seed(0)
    module = Attentions(depth, dropout).to(DEVICE)
    call = compiled(module, arm)
    x = torch.randn(2, 64, 64, device=DEVICE)

    def step() -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        call(x).sum().backward()
        enqueued = time.perf_counter()
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return (enqueued - start) * 1e3, (time.perf_counter() - start) * 1e3

    return step


ARMS = (
    "default",
    "reduce-overhead",
    "cudagraphs",
    "cgpass-inductor",
    "cgpass-inductor-paired",
    "cgpass-eager",
)


DROPOUTS = (0.1, 0.0)


def measure_pairs(depth: int, rounds: int) -> dict[str, Any]:
    """Medians by arm, with dropout and without, and the difference that random numbers make."""
    results: dict[str, Any] = {arm: {} for arm in ARMS}
    steps: dict[tuple[str, float], Callable[[], tuple[float, float]]] = {}
    for arm, dropout in itertools.product(ARMS, DROPOUTS):
        step = attention_step(arm, depth, dropout)
        try:
            for _ in range(40):
                step()
        except Exception as error:  # an arm that fails is a result
            results[arm]["error"] = str(error).splitlines()[0][:200]
        else:
            steps[arm, dropout] = step
    times: dict[tuple[str, float], list[tuple[float, float]]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            step()
            times[key] += [step() for _ in range(5)]
    for (arm, dropout), pairs in times.items():
        host, total = zip(*pairs, strict=True)
        results[arm]["dropout" if dropout else "none"] = {
            "host_ms": round(statistics.median(host), 4),
            "step_ms": round(statistics.median(total), 4),
        }
    for found in results.values():
        if "dropout" in found and "none" in found:
            with_it, without = found["dropout"], found["none"]
            found["random_ms"] = {key: round(with_it[key] - without[key], 4) for key in with_it}
    return results


# ---- memory


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Blocks, each under a checkpoint function if there is one."""

    def __init__(self, depth: int, width: int, saving: Callable[..., Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.saving = saving

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.saving is None else self.saving(block, x, use_reentrant=False)
        return x


SAVINGS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "torch.utils.checkpoint": checkpoint,
    "cgpass.checkpoint": cgpass.checkpoint,
}
WAYS = ("eager", "compiled", "captured by hand")
BLOCKS = 12


def blocks_step(way: str, module: nn.Module, x: torch.Tensor) -> Step:
    """Forward and backward, with gradients that stay where they are."""
    call: Callable[..., torch.Tensor] = module
    if way == "compiled":
        call = torch.compile(module, backend=cgpass.cgpass, options={"compiler": "eager"})

    def step() -> None:
        module.zero_grad(set_to_none=way != "captured by hand")
        call(x).square().mean().backward()

    if way != "captured by hand":
        return step
    graph = cgpass.CheckpointedGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            with graph.warm_up():
                step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_memory(depth: int, width: int = 1024) -> list[dict[str, Any]]:
    """Peak bytes above the parameters, their gradients and the input."""
    rows = []
    for way in WAYS:
        for name, saving in SAVINGS.items():
            if way == "captured by hand" and name == "torch.utils.checkpoint":
                continue  # it reads the generator's state on the host
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            module = Blocks(depth, width, saving).to(DEVICE)
            x = torch.randn(8, 512, width, device=DEVICE)
            fixed = torch.cuda.memory_allocated() + sum(p.nbytes for p in module.parameters())
            torch.cuda.reset_peak_memory_stats()
            step = blocks_step(way, module, x)
            for _ in range(6):
                step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - fixed
            rows.append({"way": way, "checkpoint": name, "activation_mib": round(peak / 2**20, 1)})
            del step, module, x
    return rows


def main() -> None:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=arguments.count, default=48, help="checkpointed attentions")
    parser.add_argument("--rounds", type=arguments.count, default=12)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    results = {
        **meta.describe(DEVICE.type),
        "num_pairs": args.depth,
        "num_blocks": BLOCKS,
        "pairs": measure_pairs(args.depth, args.rounds),
        "memory": measure_memory(BLOCKS),
    }
    print(json.dumps(results, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
