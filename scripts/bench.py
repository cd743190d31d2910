"""Compares ways of running forward and backward of real models.

    python scripts/bench.py --out bench.json --markdown bench.md
    python scripts/bench.py --models gpt2 --arms default,cgpass --steps 20
    python scripts/bench.py --memory --out memory.json
    python scripts/bench.py --inference --out inference.json
    python scripts/bench.py --device cpu --tiny --models gpt2 --steps 2 --rounds 1
    python scripts/bench.py --from new.json --compare old.json

Times: all arms of a model in one process, in interleaved blocks. The processes of all models
compile side by side; then they measure one after the other, with nothing else running.
Memory (`--memory`): one process per arm with a fresh compile cache.
Inference (`--inference`): calls under torch.no_grad() of the models in eval mode, timed as steps are.
`--compare` shows what changed against an older result, with status 1 where cgpass got worse against the other arms
of its own run (machines differ between runs) or needs more memory. Where an arm of cgpass fails, or its losses differ or
were not compared, or it has no figures, or models are left out for want of time, the status is 1 in any case; arms that
are there to be compared with may fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchlib import arguments, arms, compare, meta, models, plots, report, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

# Arms that capture by hand or whatever they are given: a failure may leave CUDA unusable.
RISKY = ("cudagraphs", "limit")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    model_names, arm_names = arguments.names(models.SPECS), arguments.names(arms.KNOWN)
    add("--models", type=model_names, help=f"names, with commas, of {','.join(models.SPECS)}: all")
    more = ", ".join(name for name in arms.KNOWN if name not in arms.NAMES)
    add(
        "--arms",
        type=arm_names,
        help=f"names, with commas; usual: {','.join(arms.NAMES)} (with --memory without {arms.LEAN}, with "
        f"--inference {','.join(arms.INFERENCE)}); also {more}",
    )
    add("--steps", type=arguments.count, default=10, help="synchronised steps per block")
    add("--rounds", type=arguments.count, default=6, help="blocks per arm")
    add("--check-steps", type=arguments.count, default=5, help="steps whose losses are compared")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--memory", action="store_true", help="peak memory and compile time instead of times")
    instead("--inference", action="store_true", help="calls without gradients instead of steps")
    instead("--compile-only", action="store_true", help="fill the compile cache and check losses")
    add(
        "--parallel",
        type=arguments.count_from_zero,
        default=0,
        help="processes compiling at a time (0: by cores)",
    )
    add("--budget", type=arguments.seconds, default=520.0, help="seconds for everything")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tiny", action="store_true", help="tiny models, to try the script")
    add("--out", type=Path, help="file for the JSON")
    add("--markdown", type=Path, help="file for the tables")
    add("--plot", type=Path, help="file for bars relative to the limit (.svg; needs matplotlib)")
    compare.add_arguments(parser, ("time", "memory", "inference"))
    add("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    compare.check_arguments(parser, args, kind(args))
    measured = compare.kind(args.source or {"kind": kind(args)})
    plots.check_argument(parser, args.plot, measured)
    return args


def kind(args: argparse.Namespace) -> str:
    """What is measured."""
    return "memory" if args.memory else "inference" if args.inference else "time"


def jobs(args: argparse.Namespace, directory: str) -> list[worker.Job]:
    """One job a model, or one a model and arm for memory."""
    names = arms.INFERENCE if args.inference else arms.NAMES
    usual = [name for name in names if not (args.memory and name == arms.LEAN)]
    chosen = tuple(args.arms or usual)
    common = {
        "device": args.device,
        "tiny": args.tiny,
        "steps": args.steps,
        "rounds": args.rounds,
        "check_steps": args.check_steps,
        "directory": directory,
    }
    if args.memory:
        return [
            worker.Job(name=f"{model}.{arm}", kind="memory", model=model, arms=(arm,), **common)
            for model in args.models or models.SPECS
            for arm in chosen
        ]
    what = "compile" if args.compile_only else kind(args)
    return [
        worker.Job(name=model, kind=what, model=model, arms=chosen, **common)
        for model in args.models or models.SPECS
    ]


class Fleet:
    """The worker processes of one run: compile side by side, measure in turn."""

    def __init__(self, args: argparse.Namespace, directory: Path, deadline: float) -> None:
        self.args = args
        self.directory = directory
        self.deadline = deadline
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.dropped: dict[str, dict[str, dict[str, Any]]] = {}
        """What is said of arms that a job was started again without, by its name."""

    def file(self, job: worker.Job, suffix: str) -> Path:
        """A file by which parent and worker talk."""
        return self.directory / f"{job.name}.{suffix}"

    def start(self, job: worker.Job) -> None:
        """Starts a worker; for memory with a compile cache of its own."""
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(meta.ROOT), env.get("PYTHONPATH")]))
        threads = "2" if job.kind == "memory" else "3"
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)
        env.setdefault("OMP_NUM_THREADS", "2")
        if job.kind == "memory":
            cache = self.directory / f"cache.{job.name}"
            env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
            env["TRITON_CACHE_DIR"] = str(cache / "triton")
        described = json.dumps(dataclasses.asdict(job))
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "--worker", described]
        self.processes[job.name] = subprocess.Popen(command, env=env, cwd=meta.ROOT)

    def await_ready(self, batch: list[worker.Job], until: float) -> None:
        """Waits until each worker is ready, gone, or too late (then it is ended)."""
        for job in batch:
            process = self.processes[job.name]
            while process.poll() is None and not self.file(job, "ready").exists():
                if time.monotonic() > until:
                    print(f"{job.name}: not ready in time, ended", flush=True)
                    process.kill()
                    process.wait()
                time.sleep(0.1)

    def restart_failed(self, batch: list[worker.Job]) -> list[worker.Job]:
        """Starts workers that died while preparing again, without the arms that may kill them."""
        again = []
        for index, job in enumerate(batch):
            status = self.processes[job.name].poll()
            safe = tuple(name for name in job.arms if name not in RISKY)
            if status in (None, 0) or safe == job.arms or not safe:
                continue
            print(f"{job.name}: ended with {status}, again without {RISKY}", flush=True)
            died = {"error": f"the process ended with status {status} while preparing"}
            wrote = self.written(job)["arms"]
            self.dropped[job.name] = {
                name: wrote[name] if "error" in wrote.get(name, {}) else died
                for name in job.arms
                if name in RISKY
            }
            batch[index] = dataclasses.replace(job, arms=safe)
            self.start(batch[index])
            again.append(batch[index])
        return again

    def turn(self, job: worker.Job) -> None:
        """Lets one ready worker measure, and waits for its end."""
        process = self.processes[job.name]
        if process.poll() is not None:
            return
        self.file(job, "go").touch()
        if job.kind == "memory":
            self._measure_footprint(job)
        try:
            process.wait(timeout=max(5.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{job.name}: out of time, ended", flush=True)
            process.kill()
            process.wait()

    def _measure_footprint(self, job: worker.Job) -> None:
        """Writes what the device gets back when the process leaves, all others being idle."""
        process = self.processes[job.name]
        while process.poll() is None and not self.file(job, "measured").exists():
            if time.monotonic() > self.deadline:
                return
            time.sleep(0.02)
        cuda = self.args.device == "cuda"
        before = torch.cuda.mem_get_info(0)[0] if cuda else 0
        self.file(job, "leave").touch()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            return
        after = torch.cuda.mem_get_info(0)[0] if cuda else 0
        self.file(job, "footprint").write_text(str(after - before))

    def written(self, job: worker.Job) -> dict[str, Any]:
        """What a worker wrote."""
        path = self.file(job, "json")
        return json.loads(path.read_text()) if path.exists() else {"model": job.model, "arms": {}}

    def collect(self, job: worker.Job) -> dict[str, Any]:
        """What a worker wrote, with how it ended, and what became of arms it was started again without."""
        data = self.written(job)
        data["arms"] |= self.dropped.get(job.name, {})
        process = self.processes[job.name]
        if process.poll() is None:
            process.kill()
            process.wait()
        if not data.get("done"):
            error = data.setdefault("error", f"the process ended with status {process.returncode}")
            if job.kind == "memory":  # a process holds one arm: the others of the model are whole
                entry = data["arms"].setdefault(job.arms[0], {})
                entry.setdefault("error", error)
                entry.setdefault("traceback", data.pop("traceback", ""))
                del data["error"]
        footprint = self.file(job, "footprint")
        entry = data["arms"].get(job.arms[0], {})
        if footprint.exists() and "reserved_bytes" in entry:
            entry["footprint_bytes"] = int(footprint.read_text())
            entry["beyond_allocator_bytes"] = entry["footprint_bytes"] - entry["reserved_bytes"]
        shutil.rmtree(self.directory / f"cache.{job.name}", ignore_errors=True)
        return data


def merge(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the results of one model's workers."""
    joined: dict[str, dict[str, Any]] = {}
    for data in found:
        known = joined.setdefault(data["model"], {**data, "arms": {}})
        known["arms"].update(data["arms"])
        joined[data["model"]] = data | known  # a process that ended early knows of no title
    return list(joined.values())


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Runs all jobs, in waves of what may compile side by side."""
    deadline = time.monotonic() + args.budget
    todo = jobs(args, str(directory))
    size = args.parallel or max(1, (os.cpu_count() or 2) * 3 // 4)
    args.parallel = size
    data: dict[str, Any] = {
        "kind": kind(args),
        "meta": meta.describe(args.device) | {"parallel": args.parallel, "tiny": args.tiny},
        "results": [],
    }
    if args.compile_only:
        data["meta"]["compile_only"] = True
    found: list[dict[str, Any]] = []
    fleet = Fleet(args, directory, deadline)
    for first in range(0, len(todo), size):
        wave = todo[first : first + size]
        left = deadline - time.monotonic()
        if left < 20:
            print(f"out of time, left out: {[job.name for job in todo[first:]]}", flush=True)
            data["left_out"] = [job.name for job in todo[first:]]
            break
        for job in wave:
            fleet.start(job)
        reserve = 0 if args.memory or args.compile_only else min(0.35 * left, 20.0 * len(wave))
        fleet.await_ready(wave, deadline - reserve)
        fleet.await_ready(fleet.restart_failed(wave), deadline - reserve)
        for job in wave:
            fleet.turn(job)
            found.append(fleet.collect(job))
            data["results"] = merge(found)
            write(args, data)
    data["meta"]["seconds"] = round(args.budget - (deadline - time.monotonic()), 1)
    return data


def write(args: argparse.Namespace, data: dict[str, Any]) -> None:
    """Writes the JSON and the tables as far as they are."""
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(report.render(data))


def failures(data: dict[str, Any]) -> Iterator[str]:
    """What of a result makes it no result: what is left out or ended early, arms of cgpass that failed or differ."""
    if data.get("left_out"):
        yield f"left out, out of time: {', '.join(data['left_out'])}"
    elif not data["results"]:
        yield "no results"
    for model in data["results"]:
        if "error" in model:
            yield f"{compare.title(model)}: {' '.join(model['error'].split())[:200]}"
    yield from compare.flags(data)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, or one worker of it."""
    args = parse(argv)
    if args.worker:
        described = json.loads(args.worker)
        return worker.main(worker.Job(**described | {"arms": tuple(described["arms"])}))
    if args.source:
        data = args.source
    else:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            data = run(args, Path(directory))
    write(args, data)
    if args.plot:
        plots.draw(args.plot, plots.figures(data))
    print(report.render(data), flush=True)
    worse = compare.against(args, data)
    wrong = list(failures(data))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if worse or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
