"""Layers that FSDP2 gathers are recorded once each, where memory lies as on CUDA and theirs in a pool of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, Linux")
def test_each_layer_warms_up_in_the_first_step_and_is_recorded_in_the_second(tmp_path):
    library = tmp_path / "places.so"
    command = [COMPILER, "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += ["-o", str(library), str(HERE / "places.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    env = dict(os.environ, LD_PRELOAD=str(library), PYTHONPATH=str(HERE.parents[1]))
    line = [sys.executable, str(HERE / "gathered_layers.py"), str(library), "own"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    for rank in json.loads(done.stdout):
        assert rank["equal"]
        calls = 2 * 18
        for n, step in enumerate(rank["steps"]):
            assert (
                step["warmups"] == calls
            )  # all in the first step, and all are recorded in the second one
            assert step["recordings"] == calls * min(n, 1)
            assert step["replays"] == calls * n
            assert step["plain_calls"] == 0
