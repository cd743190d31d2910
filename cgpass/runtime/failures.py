"""Handles captures that fail: asks why, restores state, gives memory back."""

import contextlib
import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from cgpass.errors import CaptureError, StagingError
from cgpass.runtime.driver import BoxedCallable, is_capture_error
from cgpass.telemetry import CallStats
from cgpass.telemetry.reason import CallReasons

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The finding about a partition whose capture failed."""

    why: str
    again: bool = False
    """True if the function's next call compiles it again, without what can't be captured."""


class OnFailure(Protocol):
    """Finds what in a partition can't be captured, and has the rest captured."""

    def __call__(self, args: list[Any], error: Exception) -> Outcome:
        """Find what is wrong with a partition whose capture raised `error`. Leaves a call's inputs `args` as they are.

        Raises:
            Exception: `error` itself, where it is the user's own.
            CaptureError: If `on_skip` is "raise".
        """
        ...

    def forget(self) -> None:
        """Take back that the partition runs plainly: it is captured again."""
        ...


@contextlib.contextmanager
def random_state_kept(device: torch.device, args: Iterable[Any]) -> Iterator[None]:
    """Leave every generator where it is that work on `device` with inputs `args` may draw from."""
    generators = [torch.default_generator, *(a for a in args if isinstance(a, torch.Generator))]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [(g, g.get_state()) for g in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def give_memory_back(error: BaseException, device: torch.device) -> None:
    """Free what a capture held that ran out of memory: values in its frames, and blocks that lie idle."""
    traceback.clear_frames(error.__traceback__)
    if device.type == "cuda":
        torch.cuda.empty_cache()


_NAME_IT = 'Name the operator in options={"unsafe_ops": (...)} to capture the rest.'
_NO_SYNCS = "Move what waits for the device or reads data on the host out of the function to have the rest captured."
_MORE_MEMORY = "Free memory, or keep fewer recordings (max_recordings); after cgpass.reset() the next calls try again."
_OTHER_INPUT = "Pass it as a dense tensor to have the partition captured."
_BYPASSED = {
    "transform": "they came from inside of a transform",
    "no_native_code": "cgpass has no native code, which recordings need",
}
"""Why such calls run without a graph, by code."""


class Fallback:
    """Takes a partition's place: nothing but the callable itself, and why."""

    def __init__(
        self,
        name: str,
        fn: BoxedCallable,
        stats: CallStats,
        reasons: CallReasons,
        *,
        on_skip: str,
        on_failure: OnFailure | None,
    ) -> None:
        self._name = name
        self._reasons = reasons
        self._fn = fn
        self._stats = stats
        self._refuses = on_skip == "raise"
        self._level = logging.WARNING if on_skip == "warn" else logging.INFO
        self.on_failure = on_failure
        self.failure: str | None = None
        """Why it is captured no more."""
        self._refusal: CaptureError | None = None
        self._said: set[str] = set()

    def say_once(self, what: str, text: str) -> None:
        """Say something of the partition, until failures are forgotten once."""
        if what not in self._said:
            self._said.add(what)
            log.log(self._level, "%s", text)

    def raise_refusal(self) -> None:
        """Raise what a capture failed with before, if `on_skip` is "raise": it would fail again."""
        if self._refusal is not None:
            raise CaptureError(str(self._refusal))

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Run the callable itself."""
        outputs = self._fn(args)
        self._stats.plain_calls += 1
        return outputs

    def run_bypassed(self, args: list[Any], why: str) -> Sequence[Any]:
        """Run a call without a graph, whatever it is: see `Owner.bypassed`; a transform is said once."""
        if why in _BYPASSED:
            self._reasons.note(why, lambda: (_BYPASSED[why], None))
        if why == "transform":
            self.say_once(
                why,
                f"{self._name} runs without a graph inside of transforms (torch.func, vmap, batched gradients): call it "
                "outside of them to have it replayed.",
            )
        return self.run(args)

    def note_failure(self) -> bool:
        """Note that a call runs without a graph since the partition is captured no more; returns whether it is so."""
        failure = self.failure
        if failure is not None:
            self._reasons.note("capture", lambda: (failure, None))
        return failure is not None

    def leaves_plain(self, error: Exception) -> tuple[str, str]:
        """Say that inputs got no placeholder, or no memory; returns code and text of why such calls run without a graph."""
        why = _text_of(error)
        if isinstance(error, StagingError):
            what, fix = "no_placeholder", _OTHER_INPUT
            text = "calls like this one can't be recorded, and run without a graph from now on"
        else:
            what, fix = "out_of_memory", _MORE_MEMORY
            text = "there is no memory to record calls like this one, which run without a graph from now on"
        if self._refuses:
            self._refuse(error, fix)
        self.say_once(what, f"{self._name}: {text}: {why.rstrip('.')}. {fix}")
        return what, why

    def run_failed(self, args: list[Any], error: Exception) -> Sequence[Any]:
        """Make a call whose capture failed without it, and no other: an error that comes again is the user's own.

        Raises `CaptureError` if `on_skip` is "raise".
        """
        found, advice = Outcome(_text_of(error)), _NO_SYNCS
        if self.on_failure is not None:
            advice = _NAME_IT
            try:
                found = self.on_failure(list(args), error)
            except CaptureError as refusal:
                if self._refuses:
                    self._refusal = CaptureError(str(refusal))  # without frames that hold inputs
                raise
        if self._refuses and is_capture_error(error):
            self._refuse(error, advice)
        try:
            outputs = self.run(args)
        except BaseException:
            if self.on_failure is not None:
                self.on_failure.forget()
            raise
        self.failure = found.why
        self.note_failure()
        text = self._message(found.why, advice)
        if found.again:
            text = (
                f"{self._name} can't be captured as a whole; the next call compiles the function again, to capture all but "
                f"this: {found.why}"
            )
        if self._refuses:
            self._refusal = CaptureError(text)
        log.log(self._level, "%s", text)
        return outputs

    def forget(self) -> None:
        """Forget what failed, for captures to be tried again."""
        if self.on_failure is not None and (self.failure or self._refusal):
            self.on_failure.forget()
        self.failure = self._refusal = None
        self._said.clear()

    def _refuse(self, error: Exception, advice: str) -> NoReturn:
        text = self._message(_text_of(error), advice)
        self._refusal = CaptureError(text)  # another one has the frames that hold the call's inputs
        raise CaptureError(text) from error

    def _message(self, why: str, advice: str) -> str:
        then = "runs without a graph from now on"
        then = 'on_skip="raise" refuses its calls' if self._refuses else then
        text = f"{self._name} can't be captured and {then}: {why}"
        return f"{text.rstrip('.')}. {advice}"


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
