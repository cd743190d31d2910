"""Processes that work on one thing together: told what to do through pipes, each answers."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = dict[str, Any]
OTHERS_S = 3.0
"""Once one process has failed the others may wait for it: they are given so long to say why they did."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _process(target: Callable[..., None], rank: int, job: Answer, pipe: Any) -> None:
    try:
        target(rank, job, pipe)
    except BaseException as error:
        pipe.send({"error": "".join(traceback.format_exception_only(error)).strip()[:600]})
        os._exit(1)  # at once: what is left of a group would be waited for


class Crew:
    """Processes with ranks.

    Attributes:
        error: What went wrong first, None as long as all is well; from then on the processes are gone.
    """

    def __init__(
        self, target: Callable[..., None], processes: int, job: Answer, *, method: str
    ) -> None:
        """Starts them.

        Args:
            target: Called as `target(rank, job, pipe)`; sends answers, receives commands.
            processes: How many.
            job: For all of them; a free "port" is added.
            method: "fork" or "spawn".
        """
        context: Any = multiprocessing.get_context(method)
        self.error: str | None = None
        self._pipes = []
        self._processes = []
        job = job | {"port": free_port()}
        for rank in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_process, args=(target, rank, job, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def say(self, command: Any) -> None:
        """Gives all of them a command."""
        if self.error is not None:
            return
        for pipe in self._pipes:
            try:
                pipe.send(command)
            except OSError:
                continue  # it is gone; whoever hears finds out

    def hear(self, limit_s: float) -> list[Answer]:
        """One answer of each, by rank; none if something went wrong, before or now: see `error`."""
        if self.error is not None:
            return []
        end = time.monotonic() + limit_s
        answers: dict[Any, Answer] = {}
        while len(answers) < len(self._pipes):
            ready = connection.wait(
                [pipe for pipe in self._pipes if pipe not in answers],
                max(0.0, end - time.monotonic()),
            )
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()  # pyrefly: ignore[missing-attribute]
                except (EOFError, OSError):
                    answers[pipe] = {"error": "the process ended without a word"}
                if "error" in answers[pipe]:
                    end = min(end, time.monotonic() + OTHERS_S)
        silent = {"error": f"no answer within {limit_s:.0f} s"}
        found = [answers.get(pipe, silent) for pipe in self._pipes]
        errors = [answer["error"] for answer in found if "error" in answer]
        if errors:
            vague = ("no answer", "the process ended")
            self.error = min(errors, key=lambda text: text.startswith(vague))
            self.kill()
            return []
        return found

    def kill(self) -> None:
        """Ends them, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
