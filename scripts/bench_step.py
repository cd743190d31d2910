"""Time of a whole training step of small networks: `cgpass.train_step`, its pieces, its peers, and a graph by hand.

    python scripts/bench_step.py --json step.json --markdown step.md
    python scripts/bench_step.py --networks 3x256x256,50x64x8

A network is layers x width x batch: LayerNorm, Linear and GELU, bf16 autocast, fused AdamW.
  default, reduce-overhead  forward and backward by torch.compile, the optimizer eager
  pieces                    the same with backend="cgpass"
  whole                     `cgpass.train_step`
  by hand                   default's kernels and the optimizer in one `torch.cuda.graph`, nothing checked
A step is waited for; a loop is not, until its end. Milliseconds, medians; arms take turns in one process. The losses of
all arms have to be the same bits, or the status is 1.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchlib import meta
from torch import nn

import cgpass

Step = Callable[[torch.Tensor], torch.Tensor]
LR = 1e-4


def network(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [
        m for _ in range(layers) for m in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
    ]
    return nn.Sequential(*parts, nn.Linear(width, 1)).cuda()


def loss_of(model: nn.Module) -> Step:
    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        return (out.float() - 1).square().mean()

    return loss_fn


def in_pieces(model: nn.Module, **settings: Any) -> Step:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(LR, device="cuda"), fused=True
    )
    compiled = torch.compile(loss_of(model), **settings)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def whole(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return cgpass.train_step(loss_of(model), optimizer)


def by_hand(model: nn.Module) -> Step:
    lr = torch.tensor(LR, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
    compiled, side, graph = (
        torch.compile(loss_of(model)),
        torch.cuda.Stream(),
        torch.cuda.CUDAGraph(),
    )
    memory: dict[str, torch.Tensor] = {}
    calls = 0

    def body() -> None:
        loss = compiled(memory["x"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        memory["loss"] = loss.detach()

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        memory.setdefault("x", x.clone()).copy_(x)
        if calls <= 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                body()
            torch.cuda.current_stream().wait_stream(side)
            return memory["loss"]
        if calls == 4:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                body()
        graph.replay()
        return memory["loss"]

    return step


ARMS: dict[str, Callable[[nn.Module], Step]] = {
    "default": in_pieces,
    "reduce-overhead": lambda model: in_pieces(model, mode="reduce-overhead"),
    "pieces": lambda model: in_pieces(model, backend=cgpass.cgpass),
    "whole": whole,
    "by hand": by_hand,
}


def timed(step: Step, xs: list[torch.Tensor], number: int) -> tuple[float, float, float]:
    """A step, its host time, and one of a loop, in ms: medians of `number`."""
    steps, hosts = [], []
    for n in range(number):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(xs[n % len(xs)])
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
    start = time.perf_counter()
    for n in range(number):
        step(xs[n % len(xs)])
    torch.cuda.synchronize()
    loop = (time.perf_counter() - start) / number
    return statistics.median(steps) * 1e3, statistics.median(hosts) * 1e3, loop * 1e3


def measured(layers: int, width: int, batch: int) -> dict[str, Any]:
    torch._dynamo.reset()
    models = {name: network(layers, width) for name in ARMS}
    steps = {name: make(models[name]) for name, make in ARMS.items()}
    torch.manual_seed(1)
    xs = [torch.randn(batch, width, device="cuda") for _ in range(4)]
    losses = {name: [step(xs[n % 4]).item() for n in range(12)] for name, step in steps.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ARMS}
    for _ in range(5):
        for name, step in steps.items():
            timed(step, xs, 3)
            found[name].append(timed(step, xs, 30))
    keys = ("step_ms", "host_ms", "loop_ms")
    arms = {
        name: {
            key: round(statistics.median(v), 4)
            for key, v in zip(keys, zip(*rows, strict=True), strict=True)
        }
        for name, rows in found.items()
    }
    differing = [name for name in ARMS if losses[name] != losses["default"]]
    return {"layers": layers, "width": width, "batch": batch, "arms": arms, "differing": differing}


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layers x width, batch | " + " | ".join(ARMS) + " |",
        "|---" * (len(ARMS) + 1) + "|",
    ]
    for row in rows:
        cells = [f"{a['step_ms']:.3f} / {a['loop_ms']:.3f}" for a in row["arms"].values()]
        lines.append(
            f"| {row['layers']} x {row['width']}, {row['batch']} | " + " | ".join(cells) + " |"
        )
    return "\n".join(["Step / loop, ms.", "", *lines, ""])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", default="3x256x256,50x64x8,3x64x64,3x1024x256,10x256x64")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: a simulation's times mean nothing")
    rows = []
    for text in options.networks.split(","):
        rows.append(measured(*map(int, text.split("x"))))
        print(json.dumps(rows[-1]), flush=True)
    data = {"kind": "step", "meta": meta.describe("cuda", argv), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(rows)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    differing = [f"{name} of {row['layers']} layers" for row in rows for name in row["differing"]]
    if differing:
        print(f"losses differ from default's: {', '.join(differing)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
