"""Layers graphed by hand whose parameters have memory only while they are needed, as under FSDP.

Each layer keeps its parameters as a flat shard. Before its forward and before its backward they are moved into one of
two buffers that all layers share, and out again afterwards. Capture-time hooks do this around warm-ups and captures;
in training it is done by hand around each replay. The same layers are trained without graphs, too, and must give the
same losses and parameters bit for bit. Runs on CPU with the simulated driver, on CUDA where there is a device.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable matrix products

import torch
from torch import nn
from torch.nn import functional as F

import cgpass

WIDTH, BATCH, LEARNING_RATE = 32, 8, 0.05


class Block(nn.Module):
    """A feed-forward layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Sharded:
    """A layer's parameters: a flat shard that stays, and full parameters that come and go."""

    def __init__(self, layer: nn.Module, buffer: torch.Tensor) -> None:
        self.parameters = list(layer.parameters())
        self.shard = torch.cat([p.detach().flatten() for p in self.parameters])
        self.buffer = buffer
        self.moves = 0
        self.reshard()

    def unshard(self) -> None:
        """Fill the buffer, and have the parameters lie in it: a collective, where there are several devices."""
        self.moves += 1
        self.buffer.copy_(self.shard)
        start = 0
        for p, shape in zip(self.parameters, self.shapes, strict=True):
            p.data = self.buffer[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def reshard(self) -> None:
        """Leave the buffer to other layers; the parameters have no memory then."""
        self.shapes = [p.shape for p in self.parameters] if self.moves == 0 else self.shapes
        for p in self.parameters:
            p.data = self.buffer.new_empty(0)

    def update(self) -> None:
        """A step of gradient descent on the shard."""
        grads = torch.cat([p.grad.flatten() for p in self.parameters])
        self.shard.sub_(grads, alpha=LEARNING_RATE)
        for p in self.parameters:
            p.grad = None


@dataclass(frozen=True)
class Result:
    """What one training left behind."""

    losses: list[float]
    shards: list[torch.Tensor]


def around(layer: Callable, shards: Sharded, x: torch.Tensor) -> torch.Tensor:
    """A layer's forward, with its parameters in place there and in its backward."""

    def before_backward(grad: torch.Tensor) -> torch.Tensor:
        shards.unshard()
        return grad

    shards.unshard()
    out = layer(x)
    shards.reshard()
    out.register_hook(before_backward)
    return out


def train(layers: list[Callable], shards: list[Sharded], steps: int) -> Result:
    """Train to reproduce the input shifted by one place."""
    device = shards[0].shard.device
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, device=device)
        y = x.clone().requires_grad_()
        for layer, each in zip(layers, shards, strict=True):
            y = around(layer, each, y)
        loss = F.mse_loss(y, x.roll(1, -1))
        loss.backward()
        for each in shards:
            each.reshard()
            each.update()
        losses.append(loss.item())
    return Result(losses, [each.shard for each in shards])


def build(num_layers: int, device: torch.device) -> tuple[list[Block], list[Sharded]]:
    """Layers and their shards; neighbours use different buffers."""
    torch.manual_seed(0)
    layers = [Block().to(device) for _ in range(num_layers)]
    size = sum(p.numel() for p in layers[0].parameters())
    buffers = [torch.empty(size, device=device) for _ in range(2)]
    return layers, [Sharded(layer, buffers[k % 2]) for k, layer in enumerate(layers)]


def hooks_of(shards: Sharded) -> dict[str, Callable[..., None]]:
    """Have the parameters in place around warm-ups and captures."""
    return {
        "pre_forward": lambda module, args, kwargs: shards.unshard(),
        "forward": lambda module, args, kwargs, output: shards.reshard(),
        "pre_backward": lambda module: shards.unshard(),
        "backward": lambda module: shards.reshard(),
    }


def graph(layers: list[Block], shards: list[Sharded], driver: str) -> list[nn.Module]:
    """The layers, forward and backward as CUDA graphs."""
    device = shards[0].shard.device
    samples = tuple((torch.randn(BATCH, WIDTH, device=device, requires_grad=True),) for _ in layers)
    options = cgpass.GraphedOptions(
        driver=driver, capture_time_hooks=[hooks_of(each) for each in shards]
    )
    return list(cgpass.make_graphed_callables(tuple(layers), samples, options=options))


def main(arguments: list[str] | None = None) -> None:
    """Train both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    driver = "cuda" if cuda else "simulated"
    torch.use_deterministic_algorithms(True)

    layers, shards = build(given.layers, device)
    plain = train(layers, shards, given.steps)
    layers, shards = build(given.layers, device)
    graphed = graph(layers, shards, driver)
    moves = sum(each.moves for each in shards)
    found = train(graphed, shards, given.steps)

    stats = [layer.graphed.stats for layer in graphed]
    print(f"driver {driver}: {given.layers} layers, {sum(s.recordings for s in stats)} graphs")
    print(f"parameters moved in {moves} times for warm-ups and captures, by hooks")
    print(
        f"{sum(s.replays for s in stats)} replays, {sum(s.plain_calls for s in stats)} calls without a graph"
    )
    print(f"loss {found.losses[0]:.4f} -> {found.losses[-1]:.4f}")
    same = found.losses == plain.losses and all(map(torch.equal, found.shards, plain.shards))
    print(f"losses and parameters bitwise those without graphs: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
