"""Runs programs in several processes of one machine."""

import json
import os
import socket
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import cgpass
from tests.distributed.calls import CALLS
from tests.distributed.programs import PROGRAMS, World

TIMEOUT_S = 150


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_all(world_size, device_type, compiler, names, directory):
    """Results of programs, with and without graphs, by rank and name.

    Args:
        world_size: Processes.
        device_type: "cpu" (gloo, simulated graphs) or "cuda" (NCCL).
        compiler: As the option.
        names: Of the programs.
        directory: Where they are written.
    """
    context = torch.multiprocessing.start_processes(
        _process,
        (world_size, device_type, compiler, names, str(directory), free_port()),
        nprocs=world_size,
        join=False,
        start_method="fork" if device_type == "cpu" else "spawn",
    )
    end, ended = time.monotonic() + TIMEOUT_S, False
    try:
        while (
            not ended and time.monotonic() < end
        ):  # `join` returns as soon as one process has ended
            ended = context.join(timeout=end - time.monotonic())
    except Exception:
        ended = True  # each says itself what it failed with
    for process in context.processes:
        if process.is_alive():
            process.kill()
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world_size)]
    return [{**each, "ended": ended} for each in found]


def _process(rank, world_size, device_type, compiler, names, directory, port):
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": world_size,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    # The first program that spreads its tensors is traced with more operators than later ones (DTensor finds out how
    # once): its kernels have other comments, so Inductor measures them anew, and the fastest may add in another order.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(compiler == "inductor")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/inductor{rank}"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device_type == "cpu" else "nccl")
    mesh = init_device_mesh(device_type, (world_size,))
    found = {}

    def save():
        with open(f"{directory}/{rank}.json", "w") as file:
            json.dump(found, file)

    driver = "simulated" if device_type == "cpu" else "cuda"
    for name in names:
        try:
            found[name] = _both_ways(
                (PROGRAMS | CALLS)[name], World(mesh, device, {"compiler": compiler}), driver
            )
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break  # the other one may wait for this one
        finally:
            save()
    dist.barrier()
    dist.destroy_process_group()  # with graphs alive
    found["destroyed"] = True
    save()


def _both_ways(program, world, driver):
    plain = _run(program, world, "none")
    before = cgpass.counters()
    ours = _run(program, world, driver)
    after = cgpass.counters()
    return {
        "differ": sum(not torch.equal(a, b) for a, b in zip(ours, plain, strict=True)),
        "counters": {key: after[key] - before[key] for key in after},
    }


def _run(program, world, driver):
    torch.compiler.reset()
    world.options = {**world.options, "driver": driver, "on_skip": "silent"}
    return program(world)
