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


pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs a C compiler, Linux"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The allocator, to be loaded before all else."""
    path = tmp_path_factory.mktemp("places") / "places.so"
    command = [COMPILER, "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += ["-o", str(path), str(HERE / "places.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    return path


def steps(library, forwards):
    """What was counted up to each step, by rank; losses are checked."""
    env = dict(os.environ, LD_PRELOAD=str(library), PYTHONPATH=str(HERE.parents[1]))
    program = HERE / "gathered_layers.py"
    line = [sys.executable, str(program), str(library), "own", str(forwards)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert all(rank["equal"] for rank in found)
    return [rank["steps"] for rank in found]


def test_each_layer_is_recorded_once_and_replayed_from_the_second_step_on(library):
    calls = 2 * 18
    for first, *others in steps(library, 1):
        without = first["warmups"] + first["plain_calls"]
        assert without <= 4
        for n, step in enumerate(others, 1):
            assert step["recordings"] == calls
            assert step["warmups"] + step["plain_calls"] == without
            assert step["replays"] == calls * (n + 1) - without


def test_layers_that_come_in_another_order_than_they_were_recorded_in_are_so_anew(library):
    """Two forwards ahead of the backward: the second ones are recorded before the first ones are."""
    calls = 2 * 2 * 18
    for rank in steps(library, 2):
        *_, before, last = rank
        assert last["replays"] == before["replays"] + calls
        assert last["recordings"] == before["recordings"]
        assert last["plain_calls"] == before["plain_calls"] < calls
        # What comes in (for the backward, too) and gradients: what a forward saved is read where it lies.
        each = 2 * 64 * 160 * 4
        assert last["copied_bytes"] - before["copied_bytes"] <= 2 * calls * each
