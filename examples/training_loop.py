"""A training loop as people write it: mixed precision, gradient accumulation, clipping, a scheduler.

Nothing in the loop knows of CUDA graphs: gradients accumulate over several
backwards, are scaled, clipped and dropped, losses are kept in a list, and validation runs in between.
"""

import torch
from torch import nn
from torch.nn import functional as F

import cgpass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # there the graphs are simulated, and Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

WIDTH, CLASSES, BATCH = 64, 10, 16
ACCUMULATE, UPDATES = 4, 10


def make_model() -> nn.Module:
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(4 * WIDTH, CLASSES)).to(DEVICE)


def make_batch(teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    return x, (x @ teacher).argmax(dim=1)


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    teacher = torch.randn(WIDTH, CLASSES, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, UPDATES)
    scaler = torch.amp.GradScaler(DEVICE)  # for float16; bfloat16 does without

    @torch.compile(backend="cgpass")
    def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16):
            return F.cross_entropy(model(x), target)

    losses = []
    for update in range(UPDATES):
        model.train()
        for _ in range(ACCUMULATE):
            loss = loss_of(*make_batch(teacher))
            scaler.scale(loss / ACCUMULATE).backward()
            losses.append(loss.detach())  # stays what it is, however often the graph is replayed
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        if update % 5 == 4:
            model.eval()
            with torch.no_grad():
                held_out = loss_of(*make_batch(teacher))
            print(f"update {update + 1}: loss {loss.item():.3f}, held out {held_out.item():.3f}")

    means = torch.stack(losses).view(UPDATES, ACCUMULATE).mean(dim=1)
    print(f"mean loss of an update: {means[0]:.3f} -> {means[-1]:.3f}")
    print(cgpass.summary())
    counts = cgpass.counters()
    print(", ".join(f"{name} {counts[name]}" for name in ("recordings", "replays", "plain_calls")))


if __name__ == "__main__":
    main()
