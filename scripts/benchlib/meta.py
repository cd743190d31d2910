"""Origin of figures: machine, versions, commit and command."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def first_line(command: list[str]) -> str:
    """Return the first line that a command prints, empty if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def commit(root: Path = ROOT) -> str:
    """Return a checkout's commit; this one's from BENCH_COMMIT where it has no history."""
    named = os.environ.get("BENCH_COMMIT", "") if root == ROOT else ""
    if named or not (root / ".git").exists():
        return named
    return first_line(["git", "-C", str(root.resolve()), "rev-parse", "--short", "HEAD"])


def command() -> str:
    """Return this command as others would type it: files by their names."""
    words = [word.rpartition("/")[2] if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *words])


def describe(device: str) -> dict[str, Any]:
    """Return all of it, for the results of a script."""
    cuda = device == "cuda"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gpu": torch.cuda.get_device_name(0) if cuda else device,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "driver": first_line(query) if cuda else "-",
        "cores": os.cpu_count(),
        "commit": commit(),
        "command": command(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
