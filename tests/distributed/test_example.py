"""The example of several devices, in each of its modes, in two processes."""

import contextlib
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.distributed.processes import free_port, wait

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"


def run(rank, mode, port, directory):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()}, LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own of itself
    sys.argv = [str(EXAMPLE), "--mode", mode]
    with open(f"{directory}/{rank}", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs one GPU a process")
@pytest.mark.parametrize(
    "mode",
    ["simple-fsdp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tp", "fsdp", "ddp"))],
)
def test_losses_go_on_as_before_after_a_checkpoint(mode, tmp_path):
    given = mode, free_port(), str(tmp_path)
    context = torch.multiprocessing.start_processes(
        run, given, nprocs=2, join=False, start_method="fork"
    )
    try:
        assert wait(context, list, ()) is None
    finally:
        for process in context.processes:
            process.kill()
    text = (tmp_path / "0").read_text()
    assert "losses with a checkpoint half way: the same" in text
    # the processes were forked, so functions of tests before are named beside
    own = [line for line in text.splitlines() if " of train_distributed.py:" in line]
    assert {line.split()[0] for line in own} == {"forward", "backward"}
    assert all(": 1 partition captured (" in line for line in own)
