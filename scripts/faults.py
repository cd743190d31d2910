"""Raises errors everywhere in the runtime, one at a time, and checks that the program goes on as if it had not been.

    python scripts/faults.py --every 20
    python scripts/faults.py --programs hooks,dropout
    python scripts/faults.py --kind captures       # errors at the operators of three models
    python scripts/faults.py --kind alarms         # signals, 2,000 over five programs
    python scripts/faults.py --every 10 --markdown docs/results/faults-cpu-torch2.11.md

Small programs run with the simulated driver, or on CUDA (`--driver cuda`). A fault is a KeyboardInterrupt, a MemoryError or a
RuntimeError, raised at a line of the runtime, or before or after a native call that it makes. Afterwards what was held has
its values, the same program gives the values of `driver="none"` bit for bit, random generators stand where they do without a
fault, no mode of torch is left on, the program is replayed again, and after `cgpass.reset()` no more tensors and recordings
are there than before. Each program runs in a process of its own, which is made again if it ends or hangs.
The status is 1 where anything was wrong.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or no process that is forked could use CUDA

import torch
from faultlib.campaign import Campaign, Fault
from faultlib.programs import PROGRAMS

from cgpass.runtime import native

SECONDS = 120
"""For one fault and the runs after it; then the process ends, with all stacks."""
SHOWN = 5
"""Faults of a program that are printed."""
MODELS = ("gpt", "convolutions", "attention")
KINDS = {
    "points": (
        "An error raised at a line or native call of the runtime",
        [name for name in PROGRAMS if name not in MODELS],
    ),
    "captures": (
        "An error raised at an operator, in warm-ups, captures and calls without a graph",
        list(MODELS),
    ),
    "alarms": (
        "An error that the handler of a signal raises, somewhere in a run",
        ["held_now_and_then", "dropout", "train_step_adamw", "pending_calls", "host_sync"],
    ),
}
ALARMS = 480
"""Of each program."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kind", default="points", choices=KINDS)
    add("--programs", default="", help=f"with commas between, of {', '.join(PROGRAMS)}")
    add("--every", type=int, default=1, metavar="K", help="take each K-th fault")
    add("--driver", default="simulated", choices=("simulated", "cuda"))
    add("--seed", type=int, default=0)
    add("--markdown", type=Path, help="where the table goes")
    given = parser.parse_args()
    names = given.programs.split(",") if given.programs else KINDS[given.kind][1]
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"no such program: {', '.join(unknown)}")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000  # a signal may have Dynamo compile again
    if not native.loader.wait():
        parser.error(f"there is no native code: {native.loader.why_not}")
    started = time.perf_counter()
    rows = [run(name, given) for name in names]
    text = table(given, rows, time.perf_counter() - started)
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    return int(any(right < injected or dead for _, injected, right, dead in rows))


def run(name: str, given: argparse.Namespace) -> tuple[str, int, int, int]:
    """Inject all faults of one program, in processes that are made until all are; returns how many came out how."""
    injected = wrong = dead = begin = 0
    while True:
        text, is_done = "before the first fault", False
        for number, what, why in in_a_process(name, given, begin):
            if number < 0:
                is_done = True
            elif what:  # which begins
                text, begin = what, number + 1
            else:
                injected += 1
                wrong += why is not None
                if why is not None and wrong <= SHOWN:
                    print(f"{name}: {text}: {why}", flush=True)
        if is_done:
            break
        injected, wrong, dead = injected + 1, wrong + 1, dead + 1
        print(f"{name}: the process ended: {text}", flush=True)
        if not begin or dead > 20:
            break
    print(f"{name}: {injected} faults, {wrong} wrong afterwards", flush=True)
    return name, injected, injected - wrong, dead


def in_a_process(
    name: str, given: argparse.Namespace, begin: int
) -> Iterator[tuple[int, str, str | None]]:
    """Yield what a forked process tells of a program's faults, from one on."""
    here, there = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=work, args=(name, given, begin, there))
    process.start()
    there.close()
    with contextlib.suppress(EOFError):
        while True:
            yield here.recv()
    process.join()


def work(name: str, given: argparse.Namespace, begin: int, pipe: Connection) -> None:
    found = faults(Campaign(name, seed=given.seed, driver=given.driver), given)
    for number, (text, inject) in enumerate(found[begin:], begin):
        pipe.send((number, text, None))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        if (why := inject()) is not False:
            pipe.send((number, "", why))
    pipe.send((-1, "", None))


def faults(campaign: Campaign, given: argparse.Namespace) -> list[Fault]:
    made = {
        "points": lambda: campaign.faults(shift=given.seed),
        "captures": campaign.captures,
        "alarms": lambda: campaign.alarms(ALARMS),
    }
    return made[given.kind]()[given.seed % given.every :: given.every]


def table(given: argparse.Namespace, rows: list[tuple[Any, ...]], seconds: float) -> str:
    """Return what was done and what came of it, in Markdown."""
    total = ("all", *(sum(row[k] for row in rows) for k in (1, 2, 3)))
    which = "every fault" if given.every == 1 else f"each {given.every}th fault"
    head = (
        f"# Faults: {which}, seed {given.seed}\n\n"
        f"{KINDS[given.kind][0]}, one at a time, and whether the program was right afterwards: `scripts/faults.py`, "
        f"driver {given.driver}, torch {torch.__version__}, Python {sys.version.split()[0]}.\n\n"
        "| program | faults | right afterwards | processes that ended |\n|---|---|---|---|\n"
    )
    body = "".join(f"| {' | '.join(map(str, row))} |\n" for row in [*rows, total])
    return f"{head}{body}\n{len(rows)} programs, {seconds:.0f} s\n"


if __name__ == "__main__":
    sys.exit(main())
