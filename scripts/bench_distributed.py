"""Measures training on several devices of one host: tensor parallel, FSDP2 and SimpleFSDP, with and without graphs.

    python scripts/bench_distributed.py --json dist-bench.json     # two GPUs
    python scripts/bench_distributed.py --tiny                     # anywhere; on CPU through gloo and simulated graphs

Each arm of each mode has processes of its own: so memory is its own, and one that fails or never ends is reported as
that. All of them compile at the same time; then they take turns, step by step of the measurement, while the others
wait. cgpass's losses and parameters are compared with the same kernels without graphs, bit by bit, in two more arms
under deterministic algorithms: else Inductor may choose other kernels for each. In a further one collectives are captured and the process group is
ended, 20 times.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from benchlib import arguments, arms, compare, meta, parallel
from benchlib.crew import Crew
from torch.distributed.device_mesh import init_device_mesh

import cgpass

TEARDOWN = "teardown"
TURNS = 3
CHECK_STEPS = 10
STEADY = 16
"""Steps until nothing new is recorded, with room: parameters that are freed and allocated again settle late."""
TURN_S = 60
ENDS_WITHIN_S = 20
"""A process group that hasn't ended until then never does."""


def work(rank: int, job: dict[str, Any], pipe: Any) -> None:
    """What each process does: a first step, then what it's told to; in the end it ends its process group."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{job['cache']}/inductor{rank}"
    warnings.simplefilter("ignore")  # torch's own of itself
    torch._dynamo.config.recompile_limit = 64  # layers share code
    torch._inductor.config.compile_threads = 1  # there are many processes
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(job["check"])
    processes, device = job["processes"], job["device"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job["port"], processes, rank == 0)
    if job["mode"] == TEARDOWN:
        ms = parallel.capture_and_end(device, store, rank, processes, job["times"])
        pipe.send({"ms": ms})
        return
    parallel.start_group(device, store, rank, processes)
    mesh = init_device_mesh(device, (processes,))
    start = time.perf_counter()
    training = parallel.Training(job["mode"], job["arm"], mesh, tiny=job["tiny"])
    training.step()
    pipe.send({"first_s": round(time.perf_counter() - start, 2)})
    while (command := pipe.recv()) != "end":
        if command == "state":
            pipe.send({"state": training.state(), "counters": cgpass.counters()})
        else:
            pipe.send(stepped(training, device, command))
    dist.destroy_process_group()  # with graphs alive
    pipe.send({})


def stepped(training: parallel.Training, device: str, count: int) -> dict[str, Any]:
    """Times of steps, and what they needed."""
    found: dict[str, Any] = {"ms": [training.step() for _ in range(count)]}
    found["counters"] = cgpass.counters()
    if device == "cuda":  # of these steps; of the first ones, all that was before, too
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return found


def summary(first: list[dict[str, Any]], turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What is told of an arm, from answers by turn (the first of which warms up) and rank."""
    warm, last = turns[0][0]["counters"], turns[-1][0]["counters"]
    found: dict[str, Any] = {
        "first_step_s": max(each["first_s"] for each in first),
        "step_ms": parallel.spread_ms([ms for turn in turns[1:] for ms in turn[0]["ms"]]),
    }
    for key in ("peak_reserved_bytes", "peak_allocated_bytes"):
        if key in turns[-1][0]:
            found[key] = max(each[key] for turn in turns for each in turn)
            found[f"steady_{key}"] = max(each[key] for turn in turns[1:] for each in turn)
    if last["calls"]:
        found["warmup_counters"] = warm
        found["counters"] = {key: last[key] - warm[key] for key in last}
    return found


class Bench:
    """All arms of all modes, side by side."""

    def __init__(self, args: argparse.Namespace, device: str, cache: str) -> None:
        self.args = args
        self.job = {
            "processes": args.processes,
            "device": device,
            "tiny": args.tiny,
            "cache": cache,
            "check": False,
        }
        self.crews: list[Crew] = []
        self._begun = time.monotonic()

    def start(self, mode: str, arm: str, **more: Any) -> Crew:
        """Processes that begin with their first step."""
        job = self.job | {"mode": mode, "arm": arm} | more
        method = "fork" if job["device"] == "cpu" else "spawn"
        crew = Crew(work, self.args.processes, job, method=method)
        self.crews.append(crew)
        return crew

    def measured(self) -> dict[str, Any]:
        """Times, memory and bits."""
        args = self.args
        timed = {(mode, arm): self.start(mode, arm) for mode in args.modes for arm in args.arms}
        pairs = {
            mode: [self.start(mode, arm, check=True) for arm in ("cgpass", arms.REFERENCE)]
            for mode in args.modes
            if "cgpass" in args.arms
        }
        teardown = self.start(TEARDOWN, "cgpass", times=args.teardowns)
        apart = [crew for pair in pairs.values() for crew in pair]
        answers = heard([*timed.values(), *apart, teardown], args.limit)
        first, ended = dict(zip(timed, answers, strict=False)), answers[-1]
        for name, crew in timed.items():
            self.tell(f"{', '.join(name)}: {crew.error or first[name][0]}")
        turns: dict[Any, list[Any]] = {name: [] for name in timed}
        steady = 2 if args.tiny else STEADY
        for count in (steady, *[max(1, args.steps // TURNS)] * TURNS):
            for name, crew in timed.items():
                crew.say(count)
                turns[name].append(crew.hear(TURN_S))
            self.tell(f"{count} steps of each")
        checks = {mode: self.checked(mode, *pair) for mode, pair in pairs.items()}
        self.tell("bits compared")
        for crew in timed.values():
            crew.say("end")
        end = time.monotonic() + ENDS_WITHIN_S
        modes: dict[str, Any] = {mode: {"arms": {}} for mode in args.modes}
        for (mode, arm), crew in timed.items():
            entry = modes[mode]["arms"][arm] = {"error": crew.error}
            if crew.error is None:
                entry = modes[mode]["arms"][arm] = summary(first[mode, arm], turns[mode, arm])
                crew.hear(max(0.1, end - time.monotonic()))
                entry["process_group_ended"] = crew.error is None
                if arm == "cgpass":
                    entry["check"] = checks[mode]
        told = {"error": teardown.error} if teardown.error else {"ms": ended[0]["ms"]}
        return {"modes": modes, "teardowns": {"asked": args.teardowns} | told}

    def checked(self, mode: str, ours: Crew, plain: Crew) -> dict[str, Any]:
        """Whether losses and parameters are bitwise those without graphs."""
        steps = 4 if self.args.tiny else CHECK_STEPS
        crews = [ours, plain]
        (with_graphs, replays), (without, _) = (state_after(crew, steps - 1) for crew in crews)
        found: dict[str, Any] = {"equal": with_graphs == without != [], "steps": steps}
        found["replays"] = replays
        errors = [crew.error for crew in crews if crew.error is not None]
        if errors:
            found["error"] = errors[0]
        elif not found["equal"]:
            again = self.start(mode, arms.REFERENCE, check=True)
            again.hear(self.args.limit)
            found["plain_repeatable"] = state_after(again, steps - 1)[0] == without
        for crew in crews:
            crew.say("end")
        for crew in crews:
            crew.hear(ENDS_WITHIN_S)
        return found

    def tell(self, what: str) -> None:
        """A line about what has been done, with the seconds since the start."""
        print(f"{time.monotonic() - self._begun:4.0f} s: {what}", flush=True)

    def close(self) -> None:
        """Nothing is left running."""
        for crew in self.crews:
            crew.kill()


def heard(crews: list[Crew], limit_s: float) -> list[list[dict[str, Any]]]:
    """What each has to say, all within one limit."""
    end = time.monotonic() + limit_s
    return [crew.hear(max(1.0, end - time.monotonic())) for crew in crews]


def state_after(crew: Crew, steps: int) -> tuple[list[list[str]], int]:
    """Digests by rank, none if something went wrong; and how often graphs were replayed."""
    crew.say(steps)
    crew.hear(TURN_S)
    crew.say("state")
    found = crew.hear(TURN_S)
    return [each["state"] for each in found], sum(each["counters"]["replays"] for each in found)


def table(modes: dict[str, Any]) -> str:
    """All arms as Markdown."""
    rows = ["| | arm | step ms (p10 to p90) | peak reserved MiB (steady) | captured/eager | note |"]
    rows.append("|---" * 6 + "|")
    for mode, found in modes.items():
        for arm, entry in found["arms"].items():
            if "error" in entry:
                error = " ".join(entry["error"].split())[:100].replace("|", "/")
                rows.append(f"| {mode} | {arm} | - | - | - | failed: {error} |")
                continue
            ms, counters = entry["step_ms"], entry.get("warmup_counters", {})
            memory, steady = (
                entry.get(f"{when}peak_reserved_bytes", 0) / 2**20 for when in ("", "steady_")
            )
            parts = f"{counters.get('partitions_captured')}/{counters.get('partitions_eager')}"
            notes = []
            if "check" in entry:
                check = entry["check"]
                bits = "equal" if check["equal"] else "**differ**"
                bits = f"not compared: {check['error'][:100]}" if "error" in check else bits
                notes.append(f"losses and parameters bitwise {bits}")
                if not check.get("plain_repeatable", True):
                    notes.append("the plain runs differ too")
            if not entry["process_group_ended"]:
                notes.append("destroy_process_group never returned")
            rows.append(
                f"| {mode} | {arm} | {ms['median']:.2f} ({ms['p10']:.2f} to {ms['p90']:.2f}) | "
                f"{f'{memory:.0f} ({steady:.0f})' if memory else '-'} | {parts if counters else '-'} | "
                f"{'; '.join(notes)} |"
            )
    return "\n".join(rows)


def listed(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return names

    return parse


def main(argv: list[str] | None = None) -> int:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = tuple(parallel.MODES)
    parser.add_argument("--modes", type=listed(modes), default=modes, help=", ".join(modes))
    parser.add_argument("--arms", type=listed(parallel.ARMS), default=parallel.ARMS)
    parser.add_argument("--processes", type=arguments.count, default=2, help="one device each")
    parser.add_argument("--steps", type=arguments.count, default=30, help="that are timed")
    parser.add_argument("--teardowns", type=arguments.count_from_zero, default=20)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a try")
    parser.add_argument(
        "--limit", type=arguments.seconds, default=300, help="seconds for the first step of all"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(argv)
    count = torch.cuda.device_count()
    device = "cuda" if count >= args.processes else "cpu"
    if device == "cpu" and not args.tiny:
        print(f"needs {args.processes} GPUs, found {count}; --tiny runs on CPU", file=sys.stderr)
        return 2
    start = time.monotonic()
    described = meta.describe(device) | {"tiny": args.tiny}
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(args, device, cache)
        try:
            found = bench.measured()
        finally:
            bench.close()
    described["seconds"] = round(time.monotonic() - start, 1)
    results = {"kind": "distributed", "meta": described | {"devices": args.processes}, **found}
    print(table(results["modes"]))
    print(f"{args.teardowns} process groups ended with graphs alive: {results['teardowns']}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = list(compare.flags(results))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
