"""Raises errors everywhere in the runtime, one at a time, and checks that the program goes on as if it had not been.

    python scripts/faults.py --every 20
    python scripts/faults.py --programs training,dropout --errors KeyboardInterrupt
    python scripts/faults.py --every 10 --markdown docs/results/faults-cpu-torch2.14.md

Small programs run with the simulated driver, or on CUDA (`--driver cuda`). A fault is a KeyboardInterrupt, a MemoryError or a RuntimeError, raised at a
line of the runtime, or before or after a native call that it makes. Afterwards what was held has its values, the same
program gives the values of `driver="none"` bit for bit, random generators stand where they do without a fault, no mode
of torch is left on, the program is replayed again, and after `cgpass.reset()` no more tensors and recordings are there than
before. Each program runs in a process of its own, which is made again if it ends or hangs.
The status is 1 where anything was wrong.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or no process that is forked could use CUDA

import torch
from faultlib.campaign import ERRORS, Campaign, Result, injected
from faultlib.programs import PROGRAMS

from cgpass.runtime import native

SHOWN = 5
"""Faults of a program that are printed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", default="", help="names with commas between; all by default")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="take each K-th fault")
    parser.add_argument("--per-line", type=int, default=3, metavar="N", help="times a line is hit")
    parser.add_argument(
        "--errors", default="", help="one a point in turns by default; or names: each"
    )
    parser.add_argument("--driver", default="simulated", choices=("simulated", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at", default="", help="only points whose text has this, as in recording.py:210"
    )
    parser.add_argument("--json", type=Path, help="where results go, with what was wrong")
    parser.add_argument("--markdown", type=Path, help="where the table goes")
    parser.add_argument("--list", action="store_true", help="print the programs' names")
    given = parser.parse_args()
    if given.list:
        print(*PROGRAMS, sep="\n")
        return 0
    names = given.programs.split(",") if given.programs else list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"no such program: {', '.join(unknown)}; --list names them")
    torch.set_num_threads(1)
    if not native.loader.wait():
        parser.error(f"there is no native code: {native.loader.why_not}")
    started = time.perf_counter()
    results = [run(name, given) for name in names]
    seconds = time.perf_counter() - started
    print(table(results, seconds))
    if given.markdown:
        given.markdown.write_text(f"{heading(given)}\n\n{table(results, seconds)}\n")
    if given.json:
        given.json.write_text(report(results, seconds, given.driver))
    return int(any(each.right < each.injected or each.dead for each in results))


def run(name: str, given: argparse.Namespace) -> Result:
    """All faults of one program, in processes that are made until all are injected."""
    result, begin = Result(name), 0
    while True:
        last, what, is_done = begin, "", False
        for message in in_a_process(name, given, begin):
            kind, value = message
            if kind == "points":
                result.points = value
            elif kind == "at":
                last, what = value
            elif kind == "fault":
                result.injected += 1
                result.right += value is None
                if value is not None:
                    result.wrong.append(value)
                    if len(result.wrong) <= SHOWN:
                        print(f"{name}: {value}", flush=True)
            else:
                is_done = True
        if is_done:
            break
        result.injected += 1
        result.dead.append(what or "before the first fault")
        print(f"{name}: the process ended: {result.dead[-1]}", flush=True)
        if not what or len(result.dead) > 20:
            break
        begin = last + 1
    wrong = result.injected - result.right
    print(f"{name}: {result.injected} faults, {wrong} wrong afterwards", flush=True)
    return result


def in_a_process(name: str, given: argparse.Namespace, begin: int) -> Iterator[tuple[str, Any]]:
    """What a forked process tells of a program's faults, from one on."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        status = 1
        try:
            with os.fdopen(write, "w") as out:

                def tell(*message: Any) -> None:
                    print(json.dumps(message), file=out, flush=True)

                work(name, given, begin, tell)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            yield tuple(json.loads(line))
    os.waitpid(pid, 0)


def work(name: str, given: argparse.Namespace, begin: int, tell: Any) -> None:
    campaign = Campaign(name, seed=given.seed, driver=given.driver)
    points = campaign.points(per_line=given.per_line)
    tell("points", len(points))
    chosen = [(is_cold, point) for is_cold, point in points if given.at in str(point)]
    named = [error for error in ERRORS if error.__name__ in given.errors.split(",")]
    faults = [
        (is_cold, point, error)
        for n, (is_cold, point) in enumerate(chosen)
        for error in (named or [ERRORS[(n + given.seed) % len(ERRORS)]])
    ][given.seed % given.every :: given.every][begin:]

    def before(number: int) -> None:
        is_cold, point, error = faults[number]
        where = "from nothing" if is_cold else "settled"
        nonlocal text
        text = f"{error.__name__} at {point}, {where}"
        tell("at", (begin + number, text))

    text = ""
    for _, why in injected(campaign, faults, before):
        tell("fault", None if why is None else f"{text}: {why}")
    tell("done", None)


def heading(given: argparse.Namespace) -> str:
    """What was done, above the table."""
    which = "every fault" if given.every == 1 else f"each {given.every}th fault"
    return (
        f"# Faults: {which}, seed {given.seed}\n\n"
        "An error raised at a line or native call of the runtime, one at a time, and whether the program was right afterwards: "
        f"`scripts/faults.py`, driver {given.driver}, torch {torch.__version__}, Python {sys.version.split()[0]}."
    )


def table(results: list[Result], seconds: float) -> str:
    """What came of it, in Markdown."""
    rows = [(r.program, r.injected, r.right, len(r.dead)) for r in results]
    total = [sum(row[k] for row in rows) for k in (1, 2, 3)]
    lines = ["| program | faults | right afterwards | processes that ended |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in [*rows, ("all", *total)]]
    lines.append(f"\n{len(rows)} programs, {seconds:.0f} s")
    return "\n".join(lines)


def report(results: list[Result], seconds: float, driver: str) -> str:
    found = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "driver": driver,
        "seconds": round(seconds),
        "injected": sum(r.injected for r in results),
        "right": sum(r.right for r in results),
        "programs": [asdict(r) for r in results],
    }
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
