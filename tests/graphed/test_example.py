"""The example runs, in seconds, and prints what it says."""

import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "graphed_layers.py"


def test_graphed_layers(capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    try:
        main(["--layers", "3", "--steps", "4"])
    finally:
        torch.use_deterministic_algorithms(False)
    out = capsys.readouterr().out
    assert "3 layers, 6 graphs" in out
    assert "moved in 24 times" in out  # (3 warm-ups + 1 capture) x forward and backward x 3 layers
    assert "24 replays, 0 calls without a graph" in out
    assert "bitwise those without graphs: True" in out
