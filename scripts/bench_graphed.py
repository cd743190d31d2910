"""Measures the host time of a graphed layer's forward and backward, against torch's own graphed callables.

    python scripts/bench_graphed.py --json graphed.json

Both arms graph copies of the same transformer layer with the same samples, in one process, in turns: a batch of calls
of one, a batch of the other. The host's time of a call is that of issuing it, the device idle before each batch; the
layer is so small that the device does not hold the host up. A backward's time includes dropping the result, and with it
the autograd graph, as happens in a step. Reported for each arm: median and quartiles in microseconds a call, for the forward, the backward and both, with
gradients cleared before each call and accumulated.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchlib import arguments, meta
from torch import nn
from torch.nn import functional as F

import cgpass

Arm = tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]


class Layer(nn.Module):
    """A small pre-norm transformer layer: 12 parameters."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_arms(width: int, length: int, device: torch.device) -> dict[str, Arm]:
    """One layer graphed by each, and our own with other settings."""
    torch.manual_seed(0)
    layer = Layer(width).to(device)

    def sample() -> torch.Tensor:
        return torch.randn(1, length, width, device=device, requires_grad=True)

    def ours(**options: Any) -> Arm:
        module = copy.deepcopy(layer)
        driver = "cuda" if device.type == "cuda" else "simulated"
        given = cgpass.GraphedOptions(driver=driver, **options)
        return (
            cgpass.make_graphed_callables(module, (sample(),), options=given),
            list(module.parameters()),
        )

    arms = {
        "cgpass": ours(),
        "cgpass, addresses unchecked": ours(static_input_check="off"),
        "cgpass, static gradients": ours(own_grads=False),
    }
    plain = copy.deepcopy(layer)
    arms["eager"] = (plain, list(plain.parameters()))
    if device.type == "cuda":
        module = copy.deepcopy(layer)
        graphed: Any = torch.cuda.make_graphed_callables(module, (sample(),))
        arms["torch"] = (graphed, list(module.parameters()))
    return arms


def check(arms: dict[str, Arm], x: torch.Tensor) -> None:
    """All arms compute the same.

    Raises:
        SystemExit: They don't.
    """
    found = {}
    for name, (fn, parameters) in arms.items():
        for p in parameters:
            p.grad = None
        out = fn(x)
        out.square().sum().backward()
        found[name] = [out.detach().clone(), *(p.grad.clone() for p in parameters)]
    for name, values in found.items():
        for a, b in zip(values, found["eager"], strict=True):
            if not torch.allclose(a, b, rtol=1e-3, atol=1e-4):
                sys.exit(f"{name} computes something else than eager")


def measure(arm: Arm, x: torch.Tensor, calls: int, *, accumulate: bool) -> tuple[float, float]:
    """Host time of a forward and of a backward, in microseconds, as the mean of a batch of calls."""
    fn, parameters = arm
    synchronize = torch.cuda.synchronize if x.device.type == "cuda" else lambda: None
    forward = backward = 0.0
    grad: torch.Tensor | None = None
    synchronize()
    for _ in range(calls):
        if not accumulate:
            for tensor in (x, *parameters):
                tensor.grad = None
        begin = time.perf_counter()
        out = fn(x)
        middle = time.perf_counter()
        grad = torch.ones_like(out) if grad is None else grad
        start = time.perf_counter()
        out.backward(grad)
        del out
        end = time.perf_counter()
        forward += middle - begin
        backward += end - start
        synchronize()
    return forward / calls * 1e6, backward / calls * 1e6


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median_us": round(median, 2), "low_us": round(low, 2), "high_us": round(high, 2)}


def run(arms: dict[str, Arm], x: torch.Tensor, rounds: int, calls: int) -> dict[str, Any]:
    """Every arm in turn, round after round."""
    results: dict[str, Any] = {}
    for accumulate in (False, True):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for arm in arms.values():
            measure(arm, x, calls, accumulate=accumulate)
        for number in range(rounds):
            names = list(arms)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].append(measure(arms[name], x, calls, accumulate=accumulate))
        results["accumulated" if accumulate else "cleared"] = {
            name: {
                "forward": summary([f for f, _ in pairs]),
                "backward": summary([b for _, b in pairs]),
                "both": summary([f + b for f, b in pairs]),
            }
            for name, pairs in times.items()
        }
    return results


def main() -> None:
    """Measure and print, or write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=arguments.count, default=40)
    parser.add_argument("--calls", type=arguments.count, default=50, help="in each batch")
    parser.add_argument("--width", type=arguments.count, default=64)
    parser.add_argument("--length", type=arguments.count, default=16)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    arms = make_arms(given.width, given.length, device)
    x = torch.randn(1, given.length, given.width, device=device, requires_grad=True)
    check(arms, x)
    gc.collect()
    gc.disable()
    results = run(arms, x, given.rounds, given.calls)
    document = {
        **meta.describe(device.type),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu (simulated driver)",
        "rounds": given.rounds,
        "calls": given.calls,
        "width": given.width,
        "length": given.length,
        "results": results,
    }
    if "torch" in arms:
        document["ratio_to_torch"] = {
            way: {
                part: round(
                    found["cgpass"][part]["median_us"] / found["torch"][part]["median_us"], 3
                )
                for part in ("forward", "backward", "both")
            }
            for way, found in results.items()
        }
    text = json.dumps(document, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
