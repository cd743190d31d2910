"""PyTorch Lightning on a model that was compiled with backend="cgpass": one line in the LightningModule.

The network inside is compiled, not the LightningModule around it: what `self.log` does is Lightning's host code.
"""

import sys
from importlib.util import find_spec

if not find_spec("lightning"):
    print("examples/lightning_trainer.py needs lightning: pip install -e '.[demo]'")
    sys.exit()

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cgpass

if not torch.cuda.is_available():  # then graphs are simulated; Inductor, slow on CPU, is left out
    cgpass.set_defaults(driver="simulated", compiler="eager")

WIDTH, STEPS = 16, 20


class Regression(lightning.LightningModule):
    """Learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
        )
        self.network.compile(backend="cgpass")

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(8 * STEPS, WIDTH)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)
    module = Regression()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    print(f"loss {module.losses[0].item():.3f} -> {module.losses[-1].item():.3f}")
    print(cgpass.summary())
    counts = cgpass.counters()
    print(", ".join(f"{name} {counts[name]}" for name in ("recordings", "replays", "plain_calls")))


if __name__ == "__main__":
    main()
