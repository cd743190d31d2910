"""Runs programs in several processes of one machine."""

import inspect
import json
import os
import socket
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException

from cgpass import torch_private
from tests.distributed.calls import CALLS
from tests.distributed.programs import PROGRAMS, World, calls_recorded, recordings
from tests.usage.programs import counted

LIMIT_S = 180
"""For each program. It takes seconds, so it is stuck after this, however busy the machine is."""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_all(world_size, device_type, compiler, names, directory):
    """Results of programs, which are written to a directory, with and without graphs, by rank and name."""
    context = torch.multiprocessing.start_processes(
        _process,
        (world_size, device_type, compiler, names, str(directory), free_port()),
        nprocs=world_size,
        join=False,
        start_method="fork" if device_type == "cpu" else "spawn",
    )
    try:
        why = wait(context, lambda: [_saved(directory, rank) for rank in range(world_size)], names)
    finally:
        for process in context.processes:
            process.kill()  # nothing is left of most
    return [{**_saved(directory, rank), "why": why} for rank in range(world_size)]


def wait(context, saved, names, limit_s=LIMIT_S):
    """Wait until all processes have ended; gives None, or why they did not, of which `saved` has results so far by rank."""
    last, since = None, time.monotonic()
    while True:
        try:
            if context.join(timeout=1):
                return None
        except ProcessException as error:  # the others are ended
            return str(error)
        done = [list(results) for results in saved()]
        if done != last:
            last, since = done, time.monotonic()
        elif time.monotonic() - since > limit_s:
            left = [[n for n in (*names, "destroyed") if n not in each] for each in done]
            waiting = [f"rank {rank}: {each[0]}" for rank, each in enumerate(left) if each]
            return f"timed out after {limit_s} s, waiting for {', '.join(waiting) or 'an exit'}"


def _saved(directory, rank):
    path = directory / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


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
    # once): its kernels have other comments, so Inductor measures them again, and the fastest may add in another order.
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
    found, left = {}, _recordings_at_shutdowns()

    def save():
        with open(f"{directory}/{rank}.part", "w") as file:
            json.dump(found, file)
        os.replace(file.name, f"{directory}/{rank}.json")  # whole, whenever it is read

    driver = "simulated" if device_type == "cpu" else "cuda"
    for name in names:
        try:
            found[name] = _both_ways(
                (PROGRAMS | CALLS)[name], World(mesh, device, {"compiler": compiler}), driver
            )
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            save()
            os._exit(1)  # the other one may wait for this one
        save()
    dist.barrier()
    kept = _with_a_collective(World(mesh, device, {"compiler": compiler, "driver": driver}))
    dist.destroy_process_group()  # with graphs alive
    del kept
    found["destroyed"] = left
    save()


def _recordings_at_shutdowns():
    """A list that gets how many recordings there are as each group shuts down, inside of what cgpass does before."""
    shutdown, left = inspect.unwrap(dist.ProcessGroup.shutdown), []

    def noting(group):
        left.append(len(recordings()))
        shutdown(group)

    dist.ProcessGroup.shutdown = noting
    torch_private.before_process_groups_end.cache_clear()  # what forked this one may have recorded
    return left


def _with_a_collective(world):
    """A function whose graphs are alive, and hold a collective where they may."""
    world.options |= {"on_skip": "silent", "min_partition_ops": 1}
    call = world.compile(lambda x: all_reduce(x.sin(), "sum", dist.group.WORLD).cos())
    with torch.no_grad():
        for x in world.randn(4, count=3):
            call(x)
    assert recordings()
    assert world.device.type != "cpu" or calls_recorded("all_reduce")
    return call


def _both_ways(program, world, driver):
    plain = _run(program, world, "none")
    with counted() as counters:
        ours = _run(program, world, driver)
    differ = sum(not torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    return {"differ": differ, "counters": counters}


def _run(program, world, driver):
    torch.compiler.reset()
    world.options = {**world.options, "driver": driver, "on_skip": "silent"}
    return program(world)
