"""Host time of one call around a replay that does nothing: what cgpass itself adds to a step.

    python scripts/bench_runner.py
    python scripts/bench_runner.py --sizes 10,100 --json overhead.json

Every recording is made by a stub: its graph's replay returns at once, and tensors have one element. Needs no GPU.
  runner    one PartitionRunner: n static inputs, one copied input, n outputs that autograd saves
  forward   the same through an Executor, and one output that the user gets
  backward  an Executor: n static inputs, n saved tensors, n gradients that the user gets
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchlib import arguments

from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.plan import whole_plan
from cgpass.options import Options
from cgpass.runtime import native
from cgpass.runtime.executor import Executor
from cgpass.runtime.owner import Owner
from cgpass.runtime.partition import PartitionRunner


class StubGraph:
    """A graph of nothing."""

    instantiate_ms = None

    def replay(self) -> None:
        pass

    def share(self, tensors: Any) -> None:
        pass

    def reset(self) -> None:
        pass


class StubDriver:
    """Records by running; its replays leave the outputs as they are."""

    device = torch.device("cpu")

    def record(self, fn: Any, args: list[Any], **settings: Any) -> tuple[StubGraph, list[Any]]:
        del settings
        return StubGraph(), list(fn(args))

    def warm_up(self, fn: Any, args: list[Any]) -> Any:
        return fn(args)

    def prepare_thread(self) -> None:
        pass

    def end_warm_ups(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def enter_call(self) -> None:
        pass


def make_runner(kinds: list[InputKind], num_outputs: int) -> PartitionRunner:
    infos = [InputInfo(f"x{i}", kind) for i, kind in enumerate(kinds)]

    def fn(args: list[Any]) -> list[Any]:
        args.clear()
        return [torch.zeros(1) for _ in range(num_outputs)]

    owner: Any = Owner(StubDriver())
    return PartitionRunner(fn, infos, owner, Options(on_skip="raise"), name="stub")


Case = tuple[Callable[[list[Any]], Any], list[Any], PartitionRunner]


def cases(n: int) -> dict[str, Case]:
    """What is called, its inputs, and the runner behind it, by name."""
    static, copied, pooled = InputKind.STATIC, InputKind.COPIED, InputKind.POOLED
    parameters = [torch.zeros(1) for _ in range(n)]
    x = torch.zeros(1)
    forward = make_runner([*[static] * n, copied], n + 1)
    whole = Executor(whole_plan(n + 1, n + 1, forward, "captured_0", frozenset({0})), forward.owner)
    # In a backward the saved tensors lie where the forward put them: for a stub any place is as good.
    backward = make_runner([*[static] * n, *[pooled] * n, copied], n)
    backward.owner.is_pool_storage = lambda tensor: True
    plan = whole_plan(2 * n + 1, n, backward, "captured_0", frozenset(range(n)))
    saved = [torch.zeros(1) for _ in range(n)]
    alone = make_runner([*[static] * n, copied], n)
    return {
        "runner": (alone.run, [*parameters, x], alone),
        "forward": (whole, [*parameters, x], forward),
        "backward": (Executor(plan, backward.owner), [*parameters, *saved, x], backward),
    }


def microseconds(case: Case, repeats: int) -> float:
    """Best of several blocks, per call; outputs are dropped before the next call, as a training step does."""
    call, args, runner = case
    with torch.no_grad():
        for _ in range(5):
            call(args.copy())
        number = 20
        best = float("inf")
        replays = runner.stats.replays
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(number):
                call(args.copy())
            best = min(best, (time.perf_counter() - start) / number)
    if runner.stats.replays - replays != repeats * number:
        raise RuntimeError(f"not every call was a replay: {runner.stats}")
    return best * 1e6


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """One row per case and size."""
    native.loader.wait()
    return [
        {"case": name, "n": n, "us": round(microseconds(case, repeats), 1)}
        for n in sizes
        for name, case in cases(n).items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | n | us |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row['case']} | {row['n']} | {row['us']} |" for row in rows)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="10,100,300", help="numbers of tensors, with commas")
    parser.add_argument(
        "--repeats", type=arguments.count, default=30, help="blocks of 20 calls; the best counts"
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(argv)
    rows = measure([int(n) for n in options.sizes.split(",")], options.repeats)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
