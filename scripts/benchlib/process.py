"""The process of one arm of one model: told what to do through a pipe, it answers."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchlib.worker import Job

Answer = dict[str, Any]
SCRIPTS = Path(__file__).resolve().parents[1]


def environment(job: Job, cache: Path | None) -> dict[str, str]:
    """Return the environment of a process: whose cgpass, how many threads, and which compile cache."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [job.root, str(SCRIPTS), env.get("PYTHONPATH")])
    )
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    env.setdefault("OMP_NUM_THREADS", "1" if job.device == "cpu" else "2")
    if cache is not None:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        env["TRITON_CACHE_DIR"] = str(cache / "triton")
    return env


class Process:
    """A process that runs one job; the error with which it ends goes into `entry`."""

    def __init__(self, job: Job, entry: Answer, cache: Path | None = None) -> None:
        self.job = job
        self.entry = entry
        self.is_gone = False
        self._pipe, there = multiprocessing.Pipe()
        described = json.dumps(dataclasses.asdict(job))
        command = [sys.executable, "-m", "benchlib.worker", described, str(there.fileno())]
        env = environment(job, cache)
        self.process = subprocess.Popen(command, env=env, cwd=SCRIPTS, pass_fds=[there.fileno()])
        there.close()

    def say(self, command: str) -> None:
        """Give it a command."""
        if not self.is_gone:
            with contextlib.suppress(OSError):  # it is gone; the receiver finds out
                self._pipe.send(command)

    def hear(self, until: float) -> Answer:
        """Return its answer; an empty one if something went wrong, before or now."""
        if self.is_gone:
            return {}
        answer: Answer = {"error": "no answer in time"}
        try:
            if self._pipe.poll(max(0.0, until - time.monotonic())):
                answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = {"error": "the process ended without a word"}
        if "error" not in answer:
            return answer
        self.entry |= answer
        self.is_gone = True
        self.kill()
        return {}

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
