"""Takes the pictures of a report in docs/images, in headless Chromium.

    python scripts/screenshots.py

Needs chromium and pillow, which the extra "dev" brings. The model chooses tokens by their values, so that some operators can't
be captured; where there is no CUDA device, times are those of the simulated driver.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import cgpass

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1100,1180",
]
MODES = {"light": [], "dark": ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]}


class Block(nn.Module):
    """A feed-forward layer that does more for the tokens that a gate chooses."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        chosen = torch.nonzero(self.gate(tokens).argmax(-1) == 0).squeeze(-1)
        tokens = self.down(nn.functional.gelu(self.up(tokens)))
        tokens = tokens.index_add(0, chosen, torch.tanh(tokens[chosen]))
        return x + tokens.view_as(x)


def page(path: Path) -> None:
    """Write a report."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        cgpass.set_defaults(driver="simulated", compiler="eager", min_partition_ops=1)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(64, 16)).to(device)
    report = cgpass.explain(model, torch.randn(4, 32, 64, device=device), training=True)
    report.save(path)


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.html"
        page(report)
        for mode, flags in MODES.items():
            shot = Path(directory) / f"{mode}.png"
            profile = f"--user-data-dir={directory}/{mode}"
            command = [browser, *FLAGS, *flags, profile, f"--screenshot={shot}", report.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=600)
            with Image.open(shot) as image:
                image.convert("RGB").quantize(64).save(IMAGES / f"report-{mode}.png", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
