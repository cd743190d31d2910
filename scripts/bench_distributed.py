"""Measures training on several devices of one host: tensor parallel, FSDP2 and SimpleFSDP, with and without graphs.

    python scripts/bench_distributed.py --json dist-bench.json     # two GPUs
    python scripts/bench_distributed.py --tiny                     # anywhere; on CPU through gloo and simulated graphs

Each arm of each mode runs in processes of its own, one arm after the other: so memory is its own, and one that fails
or never ends is reported as that. cgpass's losses and parameters are compared with the same kernels without graphs, all
steps, bit by bit. In the end a small program captures collectives and ends its process group, 20 times.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchlib import meta, parallel
from torch.distributed.device_mesh import init_device_mesh

TEARDOWN = "teardown"
ENDS_WITHIN_S = 20
"""After its results are there, a process is given so long to end its group."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def work(rank: int, job: dict[str, Any]) -> None:
    """What each process of a job does: writes what it found, then ends its process group with graphs alive."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"], "RANK": rank}
    place["WORLD_SIZE"] = job["processes"]
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # Each its own: ranks that measure kernels at the same time may choose different ones.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{job['cache']}/inductor{rank}"
    warnings.simplefilter("ignore")  # torch's own of itself
    found: dict[str, Any] = {}
    path = Path(job["directory"]) / f"{rank}.json"
    device = job["device"]
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if job["mode"] == TEARDOWN:
            found["ms"] = parallel.capture_and_end(device, job["steps"])
        else:
            mesh = init_device_mesh(device, (job["processes"],))
            found = parallel.measure(
                job["mode"], job["arm"], mesh, tiny=job["tiny"], steps=job["steps"]
            )
    except BaseException as error:
        found["error"] = "".join(traceback.format_exception_only(error)).strip()[-600:]
    _write(path, found)
    if "error" in found:
        os._exit(1)  # the others may wait for this one: they are ended from outside
    if dist.is_initialized():
        dist.destroy_process_group()
    _write(path, found | {"ended": True})


def _write(path: Path, found: dict[str, Any]) -> None:
    other = path.with_suffix(".new")
    other.write_text(json.dumps(found))
    other.replace(path)


def run(job: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """What each process of a job found; those that found nothing in time say so."""
    with tempfile.TemporaryDirectory() as directory:
        job = job | {"directory": directory, "port": free_port()}
        context = torch.multiprocessing.start_processes(
            work,
            (job,),
            nprocs=job["processes"],
            join=False,
            start_method="fork" if job["device"] == "cpu" else "spawn",
        )
        paths = [Path(directory) / f"{rank}.json" for rank in range(job["processes"])]
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            alive = any(process.is_alive() for process in context.processes)
            there = [json.loads(path.read_text()) for path in paths if path.exists()]
            failed = any("error" in each for each in there)
            if not alive:
                break
            if failed or (len(there) == len(paths) and "since" not in job):
                job["since"] = True
                end = min(end, time.monotonic() + (3 if failed else ENDS_WITHIN_S))
            time.sleep(0.05)
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [
            json.loads(path.read_text())
            if path.exists()
            else {"error": f"no results within {limit_s:.0f} s"}
            for path in paths
        ]


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What is told of an arm: times of the first process, memory of the largest, and whatever went wrong on any."""
    errors = dict.fromkeys(each["error"] for each in ranks if "error" in each)
    if errors:
        told = sorted(errors, key=lambda text: text.startswith("no results"))
        return {"error": told[0]}
    found = {k: v for k, v in ranks[0].items() if k != "ended"}
    for key in ("peak_reserved_bytes", "peak_allocated_bytes"):
        if key in found:
            found[key] = max(each[key] for each in ranks)
    if "check" in found:
        found["check"] = found["check"] | {"equal": all(each["check"]["equal"] for each in ranks)}
    found["process_group_ended"] = all(each.get("ended", False) for each in ranks)
    return found


def table(modes: dict[str, Any]) -> str:
    """All arms as Markdown."""
    rows = ["| | arm | step ms (p10 to p90) | peak reserved MiB | captured/eager | note |"]
    rows.append("|---" * 6 + "|")
    for mode, found in modes.items():
        for arm, entry in found["arms"].items():
            if "error" in entry:
                error = " ".join(entry["error"].split())[:100].replace("|", "/")
                rows.append(f"| {mode} | {arm} | - | - | - | failed: {error} |")
                continue
            ms, counters = entry["step_ms"], entry.get("warmup_counters", {})
            memory = entry.get("peak_reserved_bytes")
            parts = f"{counters.get('partitions_captured')}/{counters.get('partitions_eager')}"
            notes = []
            if "check" in entry:
                bits = "equal" if entry["check"]["equal"] else "**differ**"
                notes.append(f"losses and parameters bitwise {bits}")
                if not entry["check"].get("plain_repeatable", True):
                    notes.append("the plain runs differ too")
            if not entry["process_group_ended"]:
                notes.append("destroy_process_group never returned")
            rows.append(
                f"| {mode} | {arm} | {ms['median']:.2f} ({ms['p10']:.2f} to {ms['p90']:.2f}) | "
                f"{'-' if memory is None else f'{memory / 2**20:.0f}'} | {parts if counters else '-'} | "
                f"{'; '.join(notes)} |"
            )
    return "\n".join(rows)


def measured(args: argparse.Namespace, device: str, cache: str) -> dict[str, Any]:
    """All jobs, as long as the budget lasts."""
    start = time.monotonic()
    common = {
        "processes": args.processes,
        "device": device,
        "tiny": args.tiny,
        "steps": args.steps,
        "cache": cache,
    }
    modes: dict[str, Any] = {}
    left_out = []
    for mode in args.modes:
        for arm in args.arms:
            left = args.budget - (time.monotonic() - start)
            if left < args.limit / 3:
                left_out.append(f"{mode}.{arm}")
                continue
            ranks = run(common | {"mode": mode, "arm": arm}, min(args.limit, left))
            entry = merged(ranks)
            modes.setdefault(mode, {"arms": {}})["arms"][arm] = entry
            said = entry.get("error") or f"{entry['step_ms']['median']} ms"
            print(f"{mode}, {arm}: {said}", flush=True)
    left = max(args.limit / 3, args.budget - (time.monotonic() - start))
    job = common | {"mode": TEARDOWN, "arm": "cgpass", "steps": args.teardowns}
    ended = merged(run(job, min(args.limit, left)))
    print(f"{args.teardowns} process groups ended with graphs alive: {ended}", flush=True)
    found = {"modes": modes, "teardowns": {"asked": args.teardowns} | ended}
    return found | ({"left_out": left_out} if left_out else {})


def listed(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return names

    return parse


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = tuple(parallel.MODES)
    parser.add_argument("--modes", type=listed(modes), default=modes, help=", ".join(modes))
    parser.add_argument("--arms", type=listed(parallel.ARMS), default=parallel.ARMS)
    parser.add_argument("--processes", type=int, default=2, help="one device each")
    parser.add_argument("--steps", type=int, default=30, help="that are timed")
    parser.add_argument("--teardowns", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a try")
    parser.add_argument("--budget", type=float, default=440, help="seconds for all")
    parser.add_argument("--limit", type=float, default=100, help="seconds for an arm")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    count = torch.cuda.device_count()
    device = "cuda" if count >= args.processes else "cpu"
    if device == "cpu" and not args.tiny:
        print(f"needs {args.processes} GPUs, found {count}; --tiny runs on CPU", file=sys.stderr)
        return 2
    start = time.monotonic()
    described = meta.describe(device)
    with tempfile.TemporaryDirectory() as cache:
        found = measured(args, device, cache)
    described["seconds"] = round(time.monotonic() - start, 1)
    results = {"kind": "distributed", "meta": described | {"devices": args.processes}, **found}
    print(table(results["modes"]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
