"""One process of the benchmark: runs one arm of one model, as told through a pipe.

    python -m benchlib.worker JOB DESCRIPTOR     # by benchlib/process.py: a Job as JSON, and a pipe's file descriptor

`cgpass` is what PYTHONPATH names, this checkout or another one, so only public names of it are used.
"""

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchlib import arms, models

Counts = dict[str, int]
SEED = 1234
COMPARED = 5
"""Steps whose losses are compared."""
DISCARDED = 3
"""Steps before each block that are not timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process in a mode of bench.py, with a checkout's cgpass (`root`)."""

    model: str
    mode: str
    arm: str
    device: str
    tiny: bool
    steps: int
    warm_up: int
    root: str


def spread_of(values: list[float]) -> dict[str, float]:
    """Return the median, the tenth and the ninetieth percentile."""
    parts = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(parts).tolist()
    return {key: round(n, 4) for key, n in zip(("median", "p10", "p90"), found, strict=True)}


def settled(counts: list[Counts]) -> dict[str, int]:
    """Return what an arm needed until it settled, from its counters after each step.

    `steps` is the last step in which something was recorded, or called without a graph.
    """
    sums = [(0, 0), *((each["recordings"], each["plain_calls"]) for each in counts)]
    changed = [n for n in range(1, len(sums)) if sums[n] != sums[n - 1]]
    return {"steps": max(changed, default=0), "recordings": sums[-1][0], "plain_calls": sums[-1][1]}


class Worker:
    """An arm and what it is asked."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device("cuda:0" if job.device == "cuda" else "cpu")
        self.workload = models.make(
            job.model, self.device, tiny=job.tiny, inference=job.mode == "inference"
        )

    def counters(self) -> Counts:
        """Return cgpass' counters; none of an arm that is not cgpass, which never imports it."""
        return dict(sys.modules["cgpass"].counters()) if "cgpass" in sys.modules else {}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch(self, number: int) -> models.Batch:
        return self.workload.batches[number % len(self.workload.batches)]

    def first_losses(self, arm: arms.Arm, counts: list[Counts] | None = None) -> dict[str, Any]:
        """Run the first steps from a fixed seed: losses, and a sum of the weights' bits."""
        torch.manual_seed(SEED)
        losses = []
        for number in range(COMPARED):
            losses.append(float(arm.step(self.batch(number))))
            if counts is not None:
                counts.append(self.counters())
        flat = (p.detach().flatten() for p in arm.module.parameters())
        bits = [p.view(torch.uint8).sum(dtype=torch.int64) for p in flat]
        return {"losses": losses, "bits": [int(each) for each in bits]}

    def prepare(self) -> dict[str, Any]:
        """Compile, warm up, and tell what that took."""
        start = time.perf_counter()
        self.arm = arms.make(self.job.arm, self.workload)
        self.arm.prepare()
        counts: list[Counts] = []
        self.first = self.first_losses(self.arm, counts)
        found: dict[str, Any] = {"losses": self.first["losses"]}
        for number in range(self.job.warm_up):
            self.arm.step(self.batch(number))
            counts.append(self.counters())
        self.synchronize()
        found["prepare_s"] = round(time.perf_counter() - start, 2)
        if counts[-1].get("calls"):
            found["settled"] = settled(counts)
            partitions = [counts[-1][f"partitions_{k}"] for k in ("captured", "eager")]
            found |= {"partitions": partitions} if any(partitions) else {}
        if isinstance(self.arm, arms.LimitArm):
            self.arm.copies_inputs = False
        return found

    def block(self) -> dict[str, Any]:
        """Time synchronised steps with the host's part of them, then a loop without synchronisation."""
        arm, steps = self.arm, self.job.steps
        for number in range(DISCARDED):
            arm.step(self.batch(number))
        before = self.counters()
        found: dict[str, Any] = {"step_ms": [], "host_ms": []}
        for number in range(steps):
            self.synchronize()
            start = time.perf_counter()
            arm.begin()
            begun = time.perf_counter()
            arm.run(self.batch(number))
            returned = time.perf_counter()
            arm.finish()
            self.synchronize()
            found["step_ms"].append((time.perf_counter() - start) * 1e3)
            found["host_ms"].append((returned - begun) * 1e3)
        start = time.perf_counter()
        for number in range(2 * steps):
            arm.step(self.batch(number))
        self.synchronize()
        found["loop_ms"] = [(time.perf_counter() - start) * 1e3 / (2 * steps)]
        after = self.counters()
        found["counters"] = {key: after[key] - before.get(key, 0) for key in after}
        return found

    def memory(self) -> dict[str, Any]:
        """Measure peak memory of warm steps."""
        if self.device.type != "cuda":
            return {}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        for number in range(5):
            self.arm.step(self.batch(number))
        self.synchronize()
        return {
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
        }

    def check(self) -> dict[str, Any]:
        """Compare losses and weights bitwise with the same kernels without graphs."""
        return {"equal": self.first == self._again(plain=True), "deterministic": False}

    def check_deterministic(self) -> dict[str, Any]:
        """Run both again under deterministic algorithms, for models that aren't repeatable by themselves."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators that have none
            ours, plain = self._again(plain=False), self._again(plain=True)
        torch.use_deterministic_algorithms(False)
        return {"equal": ours == plain, "deterministic": True}

    def _again(self, *, plain: bool) -> dict[str, Any]:
        arm = arms.make(self.job.arm, self.workload, plain=plain)
        arm.prepare()
        return self.first_losses(arm)

    def first_steps(self) -> dict[str, Any]:
        """Time `torch.compile` and three steps; torch, weights and batches are there before."""
        for batch in self.workload.batches:
            for value in batch.values():
                value.sum().item()  # the device has woken up
        arm = arms.make(self.job.arm, self.workload)
        arm.prepare()
        for number in range(3):
            arm.step(self.batch(number)).item()
        return {"seconds": round(time.perf_counter() - arm.started, 4)}


def main(job: Job, pipe: Connection) -> None:
    """Do what is asked, until that fails or the process is ended."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # layers share code
    worker: Worker | None = None
    while True:
        command = pipe.recv()
        try:
            if worker is None:
                worker = Worker(job)
            pipe.send(getattr(worker, command)())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()[:600]
            traceback.print_exception(error)
            pipe.send({"error": text})
            pipe.close()
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), Connection(int(sys.argv[2])))
