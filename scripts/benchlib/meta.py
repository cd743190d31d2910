"""What figures were taken on: machine, versions, commit and command."""

from __future__ import annotations

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
    """First line a command prints, empty if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def commit() -> str:
    """The commit, from BENCH_COMMIT where a checkout has no history."""
    return os.environ.get("BENCH_COMMIT") or first_line(["git", "rev-parse", "HEAD"])


def describe(device: str, argv: list[str] | None = None) -> dict[str, Any]:
    """All of it, for the results of a script."""
    cuda = device == "cuda"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gpu": torch.cuda.get_device_name(0) if cuda else device,
        "driver": first_line(query) if cuda else "-",
        "cores": os.cpu_count(),
        "commit": commit(),
        "command": shlex.join(["python", *(sys.argv if argv is None else argv)]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
