"""The processes of one arm of one model: told what to do through pipes, each answers."""

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchlib.worker import Job

Answer = dict[str, Any]
SCRIPTS = Path(__file__).resolve().parents[1]
OTHERS_S = 3.0
"""Once one process has failed the others may wait for it: they are given so long to say why they did."""


def environment(job: Job, cache: Path | None) -> dict[str, str]:
    """Return the environment of a process: whose cgpass, how many threads, and which compile cache."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [job.root, str(SCRIPTS), env.get("PYTHONPATH")])
    )
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    env.setdefault("OMP_NUM_THREADS", "1" if job.device == "cpu" else "2")
    if job.processes > 1:
        env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic algorithms ask for it
    if cache is not None:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        env["TRITON_CACHE_DIR"] = str(cache / "triton")
    return env


class Crew:
    """Processes with ranks.

    Attributes:
        error: What went wrong first, as {"error": ..., "traceback": ...}; from then on the processes are gone.
    """

    def __init__(self, job: Job, cache: Path | None = None) -> None:
        self.job = job
        self.error: Answer | None = None
        self._pipes: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(job.processes):
            here, there = multiprocessing.Pipe()
            described = json.dumps(
                dataclasses.asdict(dataclasses.replace(job, rank=rank, port=port))
            )
            command = [sys.executable, "-m", "benchlib.worker", described, str(there.fileno())]
            env = environment(job, cache)
            fds = [there.fileno()]
            process = subprocess.Popen(command, env=env, cwd=SCRIPTS, pass_fds=fds)
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def say(self, command: str) -> None:
        """Give all of them a command."""
        for pipe in [] if self.error else self._pipes:
            try:
                pipe.send(command)
            except OSError:
                continue  # it is gone; whoever hears finds out

    def hear(self, until: float) -> list[Answer]:
        """Return one answer of each, by rank; none if something went wrong, before or now: see `error`."""
        if self.error is not None:
            return []
        answers: dict[Any, Answer] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            ready = connection.wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # pyrefly: ignore[missing-attribute]
                except (EOFError, OSError):
                    answers[pipe] = {"error": "the process ended without a word"}
                if "error" in answers[pipe]:
                    until = min(until, time.monotonic() + OTHERS_S)
        silent = {"error": "no answer in time"}
        found = [answers.get(pipe, silent) for pipe in self._pipes]
        errors = [answer for answer in found if "error" in answer]
        if errors:  # the one that says most
            self.error = max(errors, key=lambda answer: len(answer.get("traceback", "")))
            self.kill()
            return []
        return found

    def ask(self, command: str, until: float) -> list[Answer]:
        """Give a command and return the answers."""
        self.say(command)
        return self.hear(until)

    def kill(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
