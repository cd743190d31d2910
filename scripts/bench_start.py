"""Measures how long it takes until a model trains from graphs: with nothing cached, and in a second process.

    python scripts/bench_start.py --json start.json
    python scripts/bench_start.py --models gpt2 --device cpu --tiny     # a try, anywhere

Time begins with `torch.compile`. For each model and arm a process takes its first steps with compile caches of its own, which are empty, then another one
with what the first one left there. The arms of a model run side by side, models one after the other. What cgpass compiles
in the background (helpers in C++, once per machine) is there before. Of each first step it is noted what the compiler spent on
graphs and code that are kept (`spent_s`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchlib import arguments, arms, meta, models, spent

import cgpass
from cgpass.runtime import native

ARMS = ("default", "reduce-overhead", "cgpass")
PHASES = ("cold", "warm")
STEPS = 8
MODELS = ("gpt2", "llama", "vit_small", "mixtral")


def first_steps(model: str, arm: str, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Seconds of `torch.compile` and of each step of a new process; torch, weights and batches are there before.

    What the compiler itself consists of is imported by then or by the first step, as the backend has it, and counts.
    """
    torch.set_float32_matmul_precision("high")
    workload = models.workload(model, device, tiny=tiny)
    made = arms.make(arm, workload)
    for batch in workload.batches:
        for value in batch.values():
            value.sum().item()  # the device has woken up
    found: dict[str, Any] = {"compile_s": round(made.compile_s, 4), "steps_s": [], "replays": []}
    for number in range(STEPS):
        watched = contextlib.nullcontext({}) if number else spent.watched()
        start = time.perf_counter()
        with watched as seconds:
            made.step(workload.batches[number % len(workload.batches)]).item()
        found["steps_s"].append(round(time.perf_counter() - start, 4))
        if seconds:
            found["spent_s"] = {what: round(took, 4) for what, took in seconds.items()}
        found["replays"].append(cgpass.counters()["replays"])
    counters = cgpass.counters()
    found["partitions"] = counters["partitions_captured"] + counters["partitions_eager"]
    return found


def until_replays(replays: list[int]) -> int:
    """How many steps it took until one replayed all that a later one replays."""
    steady = [b - a for a, b in zip([0, *replays], replays, strict=False)]
    return next(n + 1 for n, count in enumerate(steady) if count == steady[-1])


def _until_step(phase: dict[str, Any], count: int) -> float:
    """Seconds from `torch.compile` to the end of so many steps."""
    return phase["compile_s"] + sum(phase["steps_s"][:count])


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """cgpass against default, from what each arm has by phase."""
    ours = found["cgpass"]
    steps = until_replays(ours["cold"]["replays"])
    cold = {arm: _until_step(found[arm]["cold"], steps) for arm in ("cgpass", "default")}
    warm = {arm: _until_step(found[arm]["warm"], 1) for arm in ("cgpass", "default")}
    return {
        "steps_until_replays": steps,
        "extra_cold_s": round(cold["cgpass"] - cold["default"], 2),
        "first_warm_ratio": round(warm["cgpass"] / warm["default"], 3),
        "partitions": ours["cold"]["partitions"],
        "default_cold_s": round(cold["default"], 2),
        "default_first_warm_s": round(warm["default"], 2),
    }


def run_arm(args: argparse.Namespace, model: str, arm: str, cache: Path) -> dict[str, Any]:
    """Both processes of an arm, one after the other."""
    env = dict(
        os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton")
    )
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(meta.ROOT), env.get("PYTHONPATH")]))
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    command = [sys.executable, str(Path(__file__).resolve()), "--one", model, arm]
    command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    found: dict[str, Any] = {}
    for phase in PHASES:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            return found | {"error": done.stderr.strip().splitlines()[-1][:300]}
        found[phase] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All models, as long as the budget lasts."""
    begun = time.monotonic()
    rows = []
    for model in args.models:
        if time.monotonic() - begun > args.budget:
            print(f"{model}: left out, no time", flush=True)
            continue
        with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(ARMS)) as pool:
            results = pool.map(
                lambda arm, model=model, at=directory: run_arm(args, model, arm, Path(at) / arm),
                ARMS,
            )
            found = dict(zip(ARMS, results, strict=True))
        row = {"model": model, "title": models.title(model, tiny=args.tiny), "arms": found}
        if not any("error" in found[arm] for arm in ("cgpass", "default")):
            row["compared"] = compared(found)
        rows.append(row)
        print(f"{model}: {row.get('compared') or found}", flush=True)
    return rows


def listed(text: str) -> list[str]:
    """Names of models."""
    names = text.split(",")
    unknown = [name for name in names if name not in models.SPECS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(models.SPECS)}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=listed, default=MODELS, help="names, with commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    parser.add_argument(
        "--budget", type=arguments.seconds, default=400, help="seconds after which none begins"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        found = first_steps(*args.one, torch.device(args.device), tiny=args.tiny)
        print(json.dumps(found))
        return 0
    native.loader.wait()
    start = time.monotonic()
    rows = measured(args)
    described = meta.describe(torch.device(args.device).type) | {"tiny": args.tiny}
    described["seconds"] = round(time.monotonic() - start, 1)
    results: dict[str, Any] = {"kind": "start", "meta": described, "results": rows}
    known = [row["model"] for row in rows]
    if left_out := [model for model in args.models if model not in known]:
        results["left_out"] = left_out
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if left_out or any("error" in row["arms"]["cgpass"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
