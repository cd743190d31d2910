"""Helpers of the GPU tests. With GPU_SUITE_DEVICE=cpu most run through the simulated driver."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("GPU_SUITE_DEVICE", "cuda"))
DRIVER = "cuda" if DEVICE.type == "cuda" else "simulated"
MARKS = [
    pytest.mark.filterwarnings("default"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]


def on_side_stream(fn):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
