"""One process of the benchmark: prepares its arms, waits for its turn, measures.

A worker writes its results to a file as soon as they exist. Turns are files beside it: the worker
makes `<job>.ready` when everything is compiled and warm, and measures once the parent has made
`<job>.go`, so that nothing else runs while one measures.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cgpass
from benchlib import alone, arms, bitwise, measure, models, report, staged
from benchlib.report import SAME_KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one worker does.

    Attributes:
        name: File name of its results, without suffix.
        kind: "time", "memory", "inference" or "compile".
        model: Name of the model.
        arms: Names of the arms.
        device: "cuda" or "cpu".
        tiny: Small models, for trying the script.
        steps: Synchronised steps per block.
        rounds: Blocks per arm.
        check_steps: Steps whose losses are compared.
        directory: Where results and turns are.
    """

    name: str
    kind: str
    model: str
    arms: tuple[str, ...]
    device: str
    tiny: bool
    steps: int
    rounds: int
    check_steps: int
    directory: str


@dataclass
class Results:
    """A dict that is written to a file on every change of note."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)

    def arm(self, name: str) -> dict[str, Any]:
        """The results of one arm."""
        return self.data.setdefault("arms", {}).setdefault(name, {})

    def write(self) -> None:
        """Replaces the file."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1))
        os.replace(partial, self.path)


def say(job: Job, text: str) -> None:
    """Prints a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {job.name}: {text}", flush=True)


def failure(error: BaseException) -> dict[str, str]:
    """An error as it goes into the results."""
    lines = traceback.format_exception(error)
    return {
        "error": f"{type(error).__name__}: {error}".strip()[:600],
        "traceback": "".join(lines)[-3000:],
    }


def prepare(job: Job, workload: models.Workload, results: Results) -> dict[str, arms.Arm]:
    """Compiles and warms up every arm; an arm that fails is recorded and left out."""
    ready: dict[str, arms.Arm] = {}
    for name in job.arms:
        say(job, f"preparing {name}")
        entry = results.arm(name)
        try:
            ready[name] = prepare_arm(job, name, workload, entry)
        except Exception as error:
            say(job, f"{name} failed: {type(error).__name__}: {str(error)[:200]}")
            entry.update(failure(error))
            arms.repair(workload.device)
        results.write()
        say(job, f"prepared {name} in {entry.get('prepare_s', '-')} s")
    return ready


def prepare_arm(job: Job, name: str, workload: models.Workload, entry: dict[str, Any]) -> arms.Arm:
    """One arm: built, run for the steps that are compared, warmed up."""
    start = time.perf_counter()
    arm = arms.make(name, workload)
    measure.synchronize(workload.device)
    built = time.perf_counter()
    with measure.counted() as counters:
        arm.prepare()
        arm.restart()
        entry["losses"] = measure.losses(arm, job.check_steps)
        for _ in range(2):
            arm.step(workload.batches[0])
        measure.synchronize(workload.device)
    entry["build_s"] = round(built - start, 2)
    entry["prepare_s"] = round(time.perf_counter() - built, 2)
    if name.startswith("cgpass"):
        entry["warmup_counters"] = counters
    return arm


def losses_to_have(entry: dict[str, Any], results: Results) -> list[float] | None:
    """Default's losses, of an arm that is one partition each way: no kernel of it is another."""
    default = results.data["arms"].get("default", {})  # asks for no row of it
    return default.get("losses") if report.partitions(entry) in report.WHOLE else None


def check(
    job: Job, workload: models.Workload, ready: dict[str, arms.Arm], results: Results
) -> None:
    """Compares losses: bitwise with the run without graphs where kernels are the same, the others with those of eager.

    Where eager was not asked for, default stands for it.
    """
    arms_of = results.data["arms"]  # asked for no row of an arm
    kinds = (arms_of.get(name, {}) for name in ("eager", "default"))
    known = next((entry["losses"] for entry in kinds if "losses" in entry), None)
    reference = bitwise.Reference(workload, job.check_steps)
    for name in ready:
        entry = results.arm(name)
        if name in SAME_KERNELS:
            say(job, f"checking losses of {name} against the run without graphs")
            try:
                found = reference.check(name, entry["losses"], losses_to_have(entry, results))
            except Exception as error:
                found = failure(error) | {"equal": False}
                arms.repair(workload.device)
            entry["check"] = found
            entry["differs"] = report.differs({"check": found}, {})
        elif known is not None and "losses" in entry:
            entry["differs"] = not measure.check_close(entry["losses"], known)
        results.write()


def signal(job: Job, word: str) -> None:
    """Tells the parent something."""
    (Path(job.directory) / f"{job.name}.{word}").touch()


def await_file(job: Job, word: str) -> None:
    """Waits for the parent's word; gives up when the parent is gone."""
    parent = os.getppid()
    while not (Path(job.directory) / f"{job.name}.{word}").exists():
        if os.getppid() != parent:
            raise RuntimeError("the parent process is gone")
        time.sleep(0.02)


def take_turn(job: Job) -> None:
    """Says that everything is ready and waits for the go."""
    signal(job, "ready")
    say(job, "ready")
    await_file(job, "go")


def measure_times(job: Job, ready: dict[str, arms.Arm], results: Results) -> None:
    """Blocks of all arms in turn, the first arm moving on each round."""
    collected: dict[str, dict[str, list[float]]] = {name: {} for name in ready}
    counters: dict[str, dict[str, int]] = {name: {} for name in ready}
    for round_index in range(job.rounds):
        names = list(ready)
        shift = round_index % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            try:
                with measure.counted() as counted:
                    loop = job.kind != "inference"
                    block = measure.time_block(ready[name], steps=job.steps, discard=3, loop=loop)
            except Exception as error:
                results.arm(name).update(failure(error))
                del ready[name]
                arms.repair(torch.device(job.device))
                continue
            counters[name] = counted
            for key, values in block.items():
                collected[name].setdefault(key, []).extend(values)
    for name in ready:
        entry = results.arm(name)
        entry.update({key: measure.spread(values) for key, values in collected[name].items()})
        if name.startswith("cgpass"):
            steps = job.steps * (1 if job.kind == "inference" else 3)
            entry.update(per_step(counters[name], steps=3 + steps))
    results.write()


def per_step(counters: dict[str, int], *, steps: int) -> dict[str, Any]:
    """Steady counters of the last block."""
    return {
        "steady_counters": counters,
        "copied_bytes_per_step": round(counters.get("copied_bytes", 0) / steps, 1),
        "replays_per_step": round(counters.get("replays", 0) / steps, 2),
    }


def measure_stages(ready: dict[str, arms.Arm], results: Results) -> None:
    """Where the host's time of a forward and a backward goes: of all arms before any is profiled."""
    steps = {name: step_of(ready[name]) for name in (report.LEAN, "cgpass") if name in ready}
    for name, step in steps.items():
        try:
            found = staged.stages(step, ready[name].workload.device)
        except Exception as error:
            found = failure(error)
        results.arm(name)["stages"] = found
        results.write()
    for name, step in steps.items():
        found = results.arm(name)["stages"]
        if "error" not in found:
            device, until_done = ready[name].workload.device, found["until_done"]
            found["guards"] = staged.guards(step, device, until_done=until_done)
            results.write()


def step_of(arm: arms.Arm) -> Callable[[], None]:
    """A forward and a backward of an arm, the gradients dropped before."""

    def step() -> None:
        arm.begin()
        arm.forward_backward(arm.workload.batches[0])

    return step


def count_kernels(ready: dict[str, arms.Arm], results: Results) -> None:
    """Captured and total kernels of one step; after all timing, since it uses a profiler."""
    for name, arm in ready.items():
        try:
            results.arm(name)["kernels"] = measure.kernels(arm)
        except Exception as error:
            results.arm(name)["kernels"] = failure(error)
        results.write()


def time_pieces(ready: dict[str, arms.Arm], results: Results) -> None:
    """What the pieces of a step take alone, of arms with eager partitions; last, since it overwrites gradients."""
    for name, arm in ready.items():
        entry = results.arm(name)
        if entry.get("warmup_counters", {}).get("partitions_eager"):
            try:
                entry["alone"] = alone.times(arm)
            except Exception as error:
                entry["alone"] = failure(error)
            results.write()


def run_time(job: Job, workload: models.Workload, results: Results) -> None:
    """All arms of a model in one process."""
    ready = prepare(job, workload, results)
    check(job, workload, ready, results)
    if job.kind == "compile":
        return
    for arm in ready.values():
        if isinstance(arm, arms.LimitArm):
            arm.copies_inputs = False
    take_turn(job)
    measure_times(job, ready, results)
    measure_stages(ready, results)
    count_kernels(ready, results)
    time_pieces(ready, results)


def run_inference(job: Job, workload: models.Workload, results: Results) -> None:
    """Calls of a model without gradients; all arms in one process."""
    ready = prepare(job, workload, results)
    check(job, workload, ready, results)
    take_turn(job)
    measure_times(job, ready, results)
    ours = {name: arm for name, arm in ready.items() if name == "cgpass"}
    measure_stages(ours, results)
    count_kernels(ours, results)


def run_memory(job: Job, workload: models.Workload, results: Results) -> None:
    """One arm of a model in a process of its own."""
    ready = prepare(job, workload, results)
    take_turn(job)
    for name, arm in ready.items():
        results.arm(name).update(measure.peak_memory(arm, steps=5))
    results.data["measured"] = True
    results.write()
    signal(job, "measured")
    await_file(job, "leave")


def main(job: Job) -> int:
    """Runs the job; returns the exit status."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # frames after a graph break are shared by the arms
    results = Results(Path(job.directory) / f"{job.name}.json", {"model": job.model, "arms": {}})
    results.write()
    device = torch.device(job.device, 0) if job.device == "cuda" else torch.device(job.device)
    try:
        workload = models.workload(job.model, device, tiny=job.tiny)
        results.data["title"] = models.title(job.model, tiny=job.tiny)
        parameters = list(workload.master.parameters())
        results.data["parameters"] = sum(parameter.numel() for parameter in parameters)
        results.data["parameter_tensors"] = len(parameters)
        workload.inference = job.kind == "inference"
        ways = {"memory": run_memory, "inference": run_inference}
        ways.get(job.kind, run_time)(job, workload, results)
    except Exception as error:
        results.data.update(failure(error))
        results.write()
        say(job, results.data["error"])
        return 1
    results.data["summary"] = cgpass.summary().splitlines()
    results.data["done"] = True
    results.write()
    say(job, "done")
    return 0
