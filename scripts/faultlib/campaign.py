"""Runs one program again and again, with a fault at another point each time, and checks what comes after it."""

import faulthandler
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import cgpass
from cgpass.runtime import capturing, simulated
from cgpass.runtime.inputs import Placeholder
from cgpass.runtime.recording import Recording
from faultlib import inject
from faultlib.inject import Point
from faultlib.programs import PROGRAMS, Run, Session, Values

ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, RuntimeError)
SECONDS = 120
"""For one fault and the runs after it; then the process ends, with all stacks."""
_PACKAGE = Path(cgpass.__file__).parent
_FILES = ("compile/training.py", "whole_step.py")
_FOLDERS = ("runtime", "graphed")
_ELSEWHERE = ("run_with_state", "recompute_fn", "_recompute")
"""Functions inside of which the default generator stands in for another one."""


def is_wanted(name: str) -> bool:
    """Whether faults are injected in a file."""
    if not name.startswith(str(_PACKAGE)):
        return False
    inside = Path(name).relative_to(_PACKAGE)
    return str(inside) in _FILES or inside.parts[0] in _FOLDERS


@dataclass
class Result:
    """What came of the faults in one program."""

    program: str
    points: int = 0
    """That a run passes, from nothing or settled."""
    injected: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


class Campaign:
    """One program, compiled once."""

    def __init__(self, name: str, *, seed: int = 0, driver: str = "simulated") -> None:
        self.name = name
        self._random = random.Random(seed)
        device = "cuda" if driver == "cuda" else "cpu"
        if device == "cuda":  # for what programs make themselves; this process runs one of them
            torch.set_default_device(device)
        session = Session("none", device)
        plain = PROGRAMS[name](session)
        _values_of(plain, session)
        self._generator_states: set[bytes] = set()
        with _Sampled(self._generator_states):
            self._expected = _values_of(plain, session)
        self._session = Session(driver, device)
        self._run = PROGRAMS[name](self._session)
        for _ in range(3):
            if (why := self._differs(_values_of(self._run, self._session))) is not None:
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

    def _count_replays(self) -> int:
        before = cgpass.counters()["replays"]
        _values_of(self._run, self._session)
        return int(cgpass.counters()["replays"] - before)

    def points(self, *, per_line: int = 3) -> list[tuple[bool, Point]]:
        """Points to raise at, and whether the run begins with nothing recorded: of each, so many times it is passed."""
        found: list[tuple[bool, Point]] = []
        for is_cold in (True, False):
            if is_cold:
                cgpass.reset()
            self._session.restore()
            with inject.noted(is_wanted) as points:
                self._run(Values())
            times = Counter(point._replace(time=0) for point in points)
            for point, number in times.items():
                middle = [self._random.randrange(number) for _ in range(per_line - 2)]
                chosen = sorted({0, number - 1, *middle})[:per_line] if per_line > 1 else [0]
                found += [(is_cold, point._replace(time=time)) for time in chosen]
        return found

    def inject(
        self, point: Point, error: type[BaseException], *, is_cold: bool
    ) -> tuple[bool, str | None]:
        """Raise one error; returns whether it came to that, and what was wrong afterwards."""
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        if is_cold:
            cgpass.reset()
        self._session.restore()
        values, caught = Values(), ""
        with inject.fault(point, error) as was_raised:
            try:
                self._run(values)
                values.note(_rng_state())
            except BaseException as raised:
                caught = type(raised).__name__
                if not was_raised():
                    raise
        if not was_raised():
            return False, None
        why = self._look(values, complete=not caught)
        faulthandler.cancel_dump_traceback_later()
        return True, why

    def _look(self, values: Values, *, complete: bool) -> str | None:
        """What is wrong after a fault, if anything."""
        if (why := self._differs(values, complete=complete)) is not None:
            return f"at once, {why}"
        if not self._generator_states.issuperset({_generator_state()}):
            return "the generator stands where it never does without the fault"
        gc.collect()  # errors that their own tracebacks hold
        before = cgpass.counters()["replays"]
        try:
            again = _values_of(self._run, self._session)
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
        if replays < self._enough:
            return f"slow: {replays} replays in the next run, {self._replays} without a fault"
        return self._leak(values, again)

    def _leak(self, *values: Values) -> str | None:
        for each in values:
            each.found.clear()
        cgpass.reset()
        self._session.restore()
        gc.collect()
        left = _living()
        more = {name: (n, left[name]) for name, n in self._left.items() if left[name] > n}
        if not more:
            return None
        self._left = left  # that of later faults counts by itself
        return f"leak: {more}"

    def _differs(self, values: Values, *, complete: bool = True) -> str | None:
        ours, expected = values.found, self._expected.found
        if complete and len(ours) != len(expected):
            return f"{len(ours)} values, not {len(expected)}"
        wrong = [n for n, (a, b) in enumerate(zip(ours, expected)) if not _same(a, b)]  # noqa: B905
        return f"values {wrong[:8]} of {len(ours)} are wrong" if wrong else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _values_of(run: Run, session: Session) -> Values:
    values = Values()
    session.restore()
    run(values)
    values.note(_rng_state())
    return values


def _modes() -> str | None:
    """What of the process or of this thread is not as it was."""
    wrong = {
        "garbage collection is off": not gc.isenabled(),
        "gradients are off": not torch.is_grad_enabled(),
        "inference mode is on": torch.is_inference_mode_enabled(),
        "autocast is on": torch.is_autocast_enabled("cpu"),
        "a capture seems to run": capturing.is_any_capture_running(),
        "torch.default_generator is replaced": not isinstance(
            torch.default_generator, torch.Generator
        ),
    }
    gc.enable()  # what is wrong counts once
    return next((why for why, is_so in wrong.items() if is_so), None)


def _living() -> Counter[str]:
    kinds = (torch.Tensor, Recording, Placeholder, simulated._Block)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def _generator_state() -> bytes:
    return bytes(_rng_state().numpy())


def _rng_state() -> torch.Tensor:
    """Of the device's default generator: the CPU's until CUDA is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()


class _Sampled:
    """Collects the states that the default generator has while a block runs."""

    def __init__(self, states: set[bytes]) -> None:
        self._states = states

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_return":
            return
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_name in _ELSEWHERE:
                return
            each = each.f_back
        self._states.add(_generator_state())

    def __enter__(self) -> None:
        self._states.add(_generator_state())
        sys.setprofile(self._see)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._states.add(_generator_state())


def injected(
    campaign: Campaign,
    chosen: list[tuple[bool, Point, type[BaseException]]],
    before: Callable[[int], None],
) -> Iterator[tuple[Point, str | None]]:
    """Inject each fault that comes to pass: the point, and what was wrong afterwards."""
    for number, (is_cold, point, error) in enumerate(chosen):
        before(number)
        came, why = campaign.inject(point, error, is_cold=is_cold)
        if came:
            yield point, why
