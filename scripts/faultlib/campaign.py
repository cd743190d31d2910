"""Runs one program again and again, with a fault at another place each time, and checks what comes after it."""

import gc
import logging
import random
import signal
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import cgpass
from cgpass.runtime import capturing
from cgpass.runtime.inputs import Placeholder
from cgpass.runtime.recording import Recording
from faultlib import inject, programs
from faultlib.inject import Point
from faultlib.programs import PROGRAMS, Session

ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, RuntimeError)
Fault = tuple[str, Callable[[], str | bool | None]]
"""Its name and its maker: returns what was wrong afterwards, if anything, or False if it did not come to pass."""
_PACKAGE = Path(cgpass.__file__).parent
_FILES = ("compile/training.py", "update.py", "whole_step.py")
_FOLDERS = ("runtime", "graphed")
_ELSEWHERE = ("run_with_state", "recompute_fn", "_recompute")
"""Functions inside of which the default generator stands in for another one."""


def in_runtime(name: str) -> bool:
    """Tell if a file is one of those in which faults are injected."""
    if not name.startswith(str(_PACKAGE)):
        return False
    inside = Path(name).relative_to(_PACKAGE)
    return str(inside) in _FILES or inside.parts[0] in _FOLDERS


def in_operators(name: str) -> bool:
    """Tell if a file is the code of a graph, which has an operator a line."""
    return name.startswith("<eval_with_key>")


@contextmanager
def alarm(seconds: float) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt once, so much later, unless the block ends before."""
    rung = []

    def ring(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != programs.__file__:
            if frame.f_code.co_filename == logging.__file__:  # it would keep its lock for ever
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                return
            frame = frame.f_back
        if frame is not None:  # else the program has not begun, or is through
            rung.append(True)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda: bool(rung)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)  # the program's own `torch.no_grad` may have been left


class Campaign:
    """One program, compiled once."""

    def __init__(self, name: str, *, seed: int = 0, driver: str = "simulated") -> None:
        self.random = random.Random(seed)
        self._program = PROGRAMS[name]
        device = "cuda" if driver == "cuda" else "cpu"
        if device == "cuda":  # for what programs make themselves; this process runs one of them
            torch.set_default_device(device)
        self._session = Session("none", device)
        self._run()
        self._generator_states: set[bytes] = set()
        with _sampled(self._generator_states):
            self._expected = self._run()
        self._session = Session(driver, device)
        self._run()
        for _ in range(3):
            if (why := self._differs(self._run())) is not None:
                raise AssertionError(f"{name}: without any fault, {why}")
        gc.collect()
        gc.freeze()
        for _ in range(2):
            cgpass.reset()
            self._replays = min(self._count_replays() for _ in range(3))
            # recordings made in another order may be one fewer where a limit is reached
            self._enough = 3 * self._replays / 4
        cgpass.reset()
        gc.collect()
        self._left = _living()

    def _run(self) -> list[torch.Tensor]:
        values = self._session.begin()
        self._program(self._session)
        self._session.note(_rng_state())
        return values

    def _count_replays(self) -> int:
        before = cgpass.counters()["replays"]
        self._run()
        return cgpass.counters()["replays"] - before

    def faults(self, shift: int = 0) -> list[Fault]:
        """List errors, in turns, at points of the runtime: the first, the last and another time that each is passed."""
        points = []
        for is_cold in (True, False):
            for point, number in self._passed(in_runtime, is_cold=is_cold).items():
                times = sorted({0, number - 1, self.random.randrange(number)})
                points += [(point._replace(time=time), is_cold) for time in times]
        return self._errors_at(points, shift)

    def captures(self) -> list[Fault]:
        """Return errors at the operators of a program that begins with nothing recorded: in warm-ups, captures and calls."""
        passed = self._passed(in_operators, is_cold=True)
        lines = [(point, number) for point, number in passed.items() if point.kind == "line"]
        return self._errors_at(
            [(point._replace(time=time), True) for point, number in lines for time in range(number)]
        )

    def alarms(self, count: int) -> list[Fault]:
        """Return signals whose handler raises, each somewhere in a run.

        What lives afterwards is not counted: in weak references' callbacks Python drops such an error, and torch compiles again.
        """
        sys.unraisablehook = lambda *args: None  # of destructors
        longest = min(timeit.repeat(self._run, number=1))
        found: list[Fault] = []
        for n in range(count):
            after, is_cold = max(0.0002, self.random.random() * longest), n % 5 == 0
            what = f"alarm after {after * 1e3:.1f} ms, {'from nothing' if is_cold else 'settled'}"
            context = partial(alarm, after)
            found.append((what, partial(self._broken_off, context, is_cold, "leak")))
        return found

    def _passed(self, wanted: Callable[[str], bool], *, is_cold: bool) -> Counter[Point]:
        """Return the points that a run passes, and how often."""
        if is_cold:
            cgpass.reset()
        self._session.begin()
        with inject.noted(wanted) as points:
            self._program(self._session)
        return Counter(point._replace(time=0) for point in points)

    def _errors_at(self, points: list[tuple[Point, bool]], shift: int = 0) -> list[Fault]:
        """Return errors, in turns, at points of runs that begin with nothing recorded, or are settled."""
        found: list[Fault] = []
        for n, (point, is_cold) in enumerate(points, shift):
            error = ERRORS[n % len(ERRORS)]
            what = f"{error.__name__} at {point}, {'from nothing' if is_cold else 'settled'}"
            context = partial(inject.fault, point, error)
            unchecked = "slow" if in_operators(point.file) else ""  # it runs without a graph
            found.append((what, partial(self._broken_off, context, is_cold, unchecked)))
        return found

    def _broken_off(
        self,
        context: Callable[[], AbstractContextManager[Callable[[], bool]]],
        is_cold: bool,
        unchecked: str,
    ) -> str | bool | None:
        """Run the program in what raises an error, and look at all after it; False if there was none."""
        if is_cold:
            cgpass.reset()
        values, complete = self._session.begin(), False
        with context() as was_raised:
            try:
                self._program(self._session)
                self._session.note(_rng_state())
                complete = True
            except BaseException:
                if not was_raised():
                    raise
        return was_raised() and self._look(values, complete=complete, unchecked=unchecked)

    def _look(self, values: list[torch.Tensor], *, complete: bool, unchecked: str) -> str | None:
        """Tell what is wrong after a fault, if anything."""
        if (why := self._differs(values, complete=complete)) is not None:
            return f"at once, {why}"
        if _generator_state() not in self._generator_states:
            return "the generator stands where it never does without the fault"
        gc.collect()  # errors that their own tracebacks hold
        before = cgpass.counters()["replays"]
        try:
            again = self._run()
        except Exception as error:
            return f"the next run raised {type(error).__name__}: {error}"[:500]
        if (why := self._differs(again)) is not None:
            return f"in the next run, {why}"
        if (why := self._differs(values, complete=complete)) is not None:
            return f"after the next run, of the first, {why}"
        if (why := _modes()) is not None:
            return why
        replays = cgpass.counters()["replays"] - before
        for _ in range(3):  # keys of calls may be due that come once more
            if replays < self._enough:
                replays = self._count_replays()
        if replays < self._enough and unchecked != "slow":
            return f"slow: {replays} replays in the next run, {self._replays} without a fault"
        values.clear()
        again.clear()
        return None if unchecked == "leak" else self._leak()

    def _leak(self) -> str | None:
        cgpass.reset()
        self._session.begin()
        gc.collect()
        left = _living()
        more = {name: (n, left[name]) for name, n in self._left.items() if left[name] > n}
        if not more:
            return None
        self._left = left  # that of later faults counts by itself
        return f"leak: {more}"

    def _differs(self, ours: list[torch.Tensor], *, complete: bool = True) -> str | None:
        expected = self._expected
        if complete and len(ours) != len(expected):
            return f"{len(ours)} values, not {len(expected)}"
        pairs = zip(ours, expected)  # noqa: B905
        wrong = [n for n, (a, b) in enumerate(pairs) if a.shape != b.shape or not torch.equal(a, b)]
        return f"values {wrong[:8]} of {len(ours)} are wrong" if wrong else None


def _modes() -> str | None:
    """Tell what of the process or of this thread is not as it was."""
    wrong = {
        "garbage collection is off": not gc.isenabled(),
        "gradients are off": not torch.is_grad_enabled(),
        "inference mode is on": torch.is_inference_mode_enabled(),
        "autocast is on": torch.is_autocast_enabled("cpu"),
        "a capture seems to run": bool(capturing.captures()),
        "torch.default_generator is replaced": not isinstance(
            torch.default_generator, torch.Generator
        ),
    }
    gc.enable()  # what is wrong counts once
    return next((why for why, is_so in wrong.items() if is_so), None)


def _living() -> Counter[str]:
    kinds = (torch.Tensor, Recording, Placeholder, torch.UntypedStorage)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def _generator_state() -> bytes:
    return bytes(_rng_state().numpy())


def _rng_state() -> torch.Tensor:
    """Return the state of the device's default generator: the CPU's until CUDA is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()


@contextmanager
def _sampled(states: set[bytes]) -> Iterator[None]:
    """Collect the states that the default generator has while a block runs."""

    def see(frame: FrameType | None, event: str, argument: Any) -> None:
        if event != "c_return":
            return
        while frame is not None:
            if frame.f_code.co_name in _ELSEWHERE:
                return
            frame = frame.f_back
        states.add(_generator_state())

    states.add(_generator_state())
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        states.add(_generator_state())
