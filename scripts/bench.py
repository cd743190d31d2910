"""Compares ways of running models: step time, host time, memory, recordings, equal results.

    python scripts/bench.py --out bench.json
    python scripts/bench.py --models gpt2 stack100 --modes train inference --arms default cgpass:rng=paired
    python scripts/bench.py --baseline ../older-checkout           # status 1 where this checkout is slower
    python scripts/bench.py --modes start --models gpt2            # first step, and a second process'
    python scripts/bench.py --device cpu --quick --models stack1   # a try, anywhere

Each arm of a model has processes of its own, whose cgpass may be another checkout's. They compile side by side, and then
take turns, block by block, while all others wait.

  step ms      a step, the device waited for before and after
  loop ms      a step of many, waited for at the end
  host ms      the host's part of a step: forward and backward until enqueued (a whole step with cgpass-step)
  peak ... MiB reserved and allocated memory of warm steps
  recordings + plain calls: those until nothing new was recorded, and the step of the last
  note         "bitwise equal": losses and weights are those of the same kernels without graphs

On CPU the simulated driver runs; its times say nothing but that the script works.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchlib import arms, meta, models, report
from benchlib.process import SCRIPTS, Answer, Process
from benchlib.worker import Job, spread_of

Entry = dict[str, Any]
MODES = ("train", "inference", "start")
NO_DISTANCE = 0.02
"""Losses of other kernels and other dropout masks may differ by this part."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    known = "\n".join(f"  {name:16} {what}" for name, what in arms.KNOWN.items())
    known += "\n\nmodels:\n"
    known += "\n".join(f"  {name:18} {spec.title}" for name, spec in models.SPECS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"arms ({' '.join(arms.USUAL)} unless named); those of cgpass take options (cgpass:compiler=eager:rng=paired):\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=models.SPECS, default=[*models.REAL], metavar="MODEL")
    add("--modes", nargs="+", choices=MODES, default=["train"])
    add("--arms", nargs="+", type=lambda name: arms.parse(name) and name, metavar="ARM")
    add("--baseline", type=Path, help="another checkout: cgpass of that in more arms, @baseline")
    add("--steps", type=int, default=10, help="synchronised steps of a block (10)")
    add("--rounds", type=int, default=6, help="blocks of each arm (6)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="tiny models and few steps")
    add("--budget", type=float, default=520.0, help="seconds for everything (520)")
    add("--out", type=Path, help="file for the JSON")
    add("--tolerance", type=float, default=5.0, help="percent that may be lost (5)")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.rounds = min(args.steps, 2), min(args.rounds, 2)
    if args.baseline and not (args.baseline / "cgpass").is_dir():
        parser.error(f"--baseline: there is no cgpass in {args.baseline}")
    return args


def jobs(args: argparse.Namespace, mode: str, model: str) -> list[Job]:
    """Return what each arm of a model does."""
    chosen = args.arms or [
        a for a in arms.USUAL if args.device == "cuda" or a not in arms.NEEDS_CUDA
    ]
    chosen = [a for a in chosen if mode != "start" or not a.startswith("limit")]
    if args.baseline:
        ours = [name for name in chosen if arms.is_ours(name)]
        chosen = [*chosen, *(name + arms.BASELINE for name in ours)]
    return [
        Job(
            model=model,
            mode=mode,
            arm=arm,
            device=args.device,
            tiny=args.quick,
            steps=args.steps,
            warm_up=8 if args.quick else 24,
            root=str(args.baseline.resolve() if arm.endswith(arms.BASELINE) else meta.ROOT),
        )
        for arm in chosen
    ]


class Bench:
    """Measures model after model, as many at a time as there are cores for."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.scratch = scratch
        self.begun = time.monotonic()
        self.deadline = self.begun + args.budget

    def measured(self, todo: list[tuple[str, str]]) -> list[Entry]:
        """Return the results of some models, each in a mode."""
        every = {key: [(job, {}) for job in jobs(self.args, *key)] for key in todo}
        for key, some in every.items():
            if key[0] == "start":
                self.started(some)
        self.stepped([some for key, some in every.items() if key[0] != "start"])
        tiny = " (tiny)" * self.args.quick
        return [
            {
                "model": model,
                "mode": mode,
                "title": models.SPECS[model].title + tiny,
                "arms": {job.arm: entry for job, entry in some},
            }
            for (mode, model), some in every.items()
        ]

    def started(self, todo: list[tuple[Job, Entry]]) -> None:
        """Time first steps with an empty compile cache, then in a second process with what the first one left."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as caches:
            for phase in ("cold", "warm"):
                every = [
                    Process(job, entry, Path(caches, str(n)))
                    for n, (job, entry) in enumerate(todo)
                    if "error" not in entry
                ]
                for each, answer in zip(every, self.all_say(every, "first_steps"), strict=True):
                    if answer:
                        each.entry[f"{phase}_s"] = answer["seconds"]
                    each.kill()

    def stepped(self, todo: list[list[tuple[Job, Entry]]]) -> None:
        """Prepare all arms of some models side by side, then measure arm after arm, model after model."""
        theirs = self.scratch / "baseline"  # what is compiled by other code
        of_models = [
            [
                Process(*pair, theirs if pair[0].arm.endswith(arms.BASELINE) else None)
                for pair in some
            ]
            for some in todo
        ]
        every = [each for some in of_models for each in some]
        try:
            for each, answer in zip(every, self.all_say(every, "prepare"), strict=True):
                each.entry |= answer
                spent, job = time.monotonic() - self.begun, each.job
                how = each.entry.get("error", "prepared")
                print(f"{spent:4.0f} s: {job.model}, {job.mode}, {job.arm}: {how}")
            for some in of_models:
                self.take_turns(some)
                self.check(some)
                for each in some:
                    each.kill()
        finally:
            for each in every:
                each.kill()

    def all_say(self, every: list[Process], command: str) -> list[Answer]:
        for each in every:
            each.say(command)
        return [each.hear(self.deadline) for each in every]

    def take_turns(self, every: list[Process]) -> None:
        """Let each arm run a block, again and again, the first one moving on; then what is measured once."""
        blocks: dict[Process, list[Answer]] = {each: [] for each in every}
        for number in range(self.args.rounds):
            shift = number % len(every)
            for each in every[shift:] + every[:shift]:
                blocks[each] += filter(None, self.all_say([each], "block"))
        for each, said in blocks.items():
            (use,) = self.all_say([each], "memory")
            each.entry |= use
            counters = [block.pop("counters") for block in said]
            for key in said[0] if said else ():
                each.entry[key] = spread_of([ms for block in said for ms in block[key]])
            if counters and counters[-1].get("calls"):
                steps = 3 * self.args.steps
                counts = {key: round(n / steps, 2) for key, n in counters[-1].items()}
                each.entry["per_step"] = {key: count for key, count in counts.items() if count}

    def check(self, every: list[Process]) -> None:
        """Compare results: of cgpass bitwise with the same kernels without graphs, others roughly with eager's."""
        todo = [each for each in every if arms.is_ours(each.job.arm) and not each.is_gone]
        for command in ("check", "check_deterministic"):
            for each, answer in zip(todo, self.all_say(todo, command), strict=True):
                each.entry["check"] = answer or {"equal": False}
            todo = [p for p in todo if not p.entry["check"]["equal"] and not p.is_gone]
        found = {each.job.arm: each.entry for each in every if "losses" in each.entry}
        names = [name for name in ("eager", "default", *found) if name in found]
        for entry in found.values():
            if "check" not in entry:
                pairs = zip(entry["losses"], found[names[0]]["losses"], strict=True)
                close = all(abs(a - b) <= NO_DISTANCE * max(1.0, abs(b)) for a, b in pairs)
                entry["check"] = {"close": close}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all models, some at a time, as long as the budget lasts."""
    about = meta.describe(args.device) | {"tiny": args.quick}
    data: dict[str, Any] = {"meta": about, "results": []}
    if args.baseline:
        about["baseline"] = meta.commit(args.baseline) or args.baseline.name
    for root in {meta.ROOT, args.baseline or meta.ROOT}:  # what is compiled once a machine
        code = "from benchlib import arms; arms.wait_for_native_code()"
        paths = os.pathsep.join([str(root.resolve()), str(SCRIPTS)])
        env = os.environ | {"PYTHONPATH": paths}
        subprocess.run([sys.executable, "-c", code], env=env, cwd=SCRIPTS, check=True)
    todo = [(mode, model) for mode in args.modes for model in args.models]
    room = max(1, (os.cpu_count() or 2) * 3 // 4)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(args, Path(scratch))
        while todo:
            if bench.deadline - time.monotonic() < 20:
                data["left_out"] = [f"{model}, {mode}" for mode, model in todo]
                break
            count = max(1, room // len(jobs(args, *todo[0])))
            wave, todo = todo[:count], todo[count:]
            data["results"] += bench.measured(wave)
            about["seconds"] = round(time.monotonic() - bench.begun, 1)
            keep(args.out, data)
    return data


def keep(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Measure, write and compare; return 1 where cgpass failed, differs or got worse."""
    args = parse(argv)
    data = run(args)
    keep(args.out, data)
    print(report.render(data), flush=True)
    wrong = report.problems(data) + report.slower_than_baseline(data, args.tolerance)
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
