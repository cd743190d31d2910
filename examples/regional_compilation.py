"""Regional compilation: layers compiled one by one share one compiled artifact, and each has its own recordings.

Compile time stays that of one layer however deep the model is. The layers' parameters are what tells their calls
apart: each set of them is recorded once.
"""

import torch
from torch import nn

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

VOCABULARY, WIDTH, LAYERS, STEPS = 64, 32, 8, 5


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).movedim(2, 0).transpose(2, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(-2)
        return x + self.mlp(self.norms[1](x))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)))
    model.to(DEVICE)
    for layer in model[1:]:
        layer.compile(backend="cgpass")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (2, 16), device=DEVICE)
    target = torch.randn(2, 16, WIDTH, device=DEVICE)
    before = cgpass.counters()
    for step in range(STEPS):
        loss = (model(tokens) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    counts = {name: count - before[name] for name, count in cgpass.counters().items()}
    print(f"{LAYERS} layers: {counts['graphs']} graphs compiled, {counts['recordings']} recordings")
    print(f"{counts['replays']} replays, {counts['plain_calls']} calls without a graph")
    print(cgpass.summary())


if __name__ == "__main__":
    main()
