"""Takes the pictures of a report in docs/images, in headless Chromium.

    python scripts/screenshots.py [--all FOLDER]

Needs chromium and pillow, which the extra "dev" brings. The model chooses tokens by their values, so that some operators can't
be captured. --all takes pages of three widths in light and in dark into a folder, to look at.
"""

import argparse
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
]
MODES = {"light": [], "dark": ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]}
WIDTHS = (500, 900, 1400)


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
    report.command = "train.py"
    report.save(path)


def take(browser: str, report: Path, mode: str, size: tuple[int, int], to: Path) -> None:
    """Take a picture of a page."""
    with tempfile.TemporaryDirectory() as directory:
        shot = Path(directory) / "shot.png"
        flags = [*FLAGS, *MODES[mode], f"--user-data-dir={directory}/profile"]
        command = [browser, *flags, f"--window-size={size[0]},{size[1]}", f"--screenshot={shot}"]
        subprocess.run([*command, report.as_uri()], check=True, capture_output=True, timeout=600)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(64).save(to, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", type=Path, help="a folder for pages of three widths")
    folder = parser.parse_args().all
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.html"
        page(report)
        for mode in MODES:
            if folder is None:
                take(browser, report, mode, (1100, 1180), IMAGES / f"report-{mode}.png")
                continue
            for width in WIDTHS:
                take(browser, report, mode, (width, 1600), folder / f"report-{mode}-{width}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
