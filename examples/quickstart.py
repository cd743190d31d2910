"""Compile a model with backend="cgpass", train it, and ask what was captured."""

import torch
from torch import nn

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1)
    )
    model.to(DEVICE)
    compiled = torch.compile(model, backend="cgpass")  # this line is all there is to it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        x = torch.randn(32, 64, device=DEVICE)
        loss = (compiled(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [
        step() for _ in range(10)
    ]  # compiles, warms up, records and replays; losses need no clone
    with cgpass.expect(replays=2 * 20, plain_calls=0):  # a forward and a backward each
        losses += [step() for _ in range(20)]
    print(f"loss {losses[0].item():.2f} -> {losses[-1].item():.2f}")
    with cgpass.explain() as report:  # what happened in these steps
        for _ in range(5):
            step()
    print(report)


if __name__ == "__main__":
    main()
