"""`Fallback`: what a partition does once it turned out that it can't be captured."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from cgpass.errors import CaptureError, StagingError
from cgpass.reason import CallReasons
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import OnFailure
from cgpass.runtime.syncs import is_capture_error
from cgpass.telemetry import CallStats

log = logging.getLogger(__name__)

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
        *,
        on_skip: str,
        on_failure: OnFailure | None,
        reasons: CallReasons | None = None,
    ) -> None:
        """Nothing failed yet.

        Args:
            name: Of the partition, for messages.
            fn: What it runs.
            stats: Where its calls are counted.
            on_skip: "warn", "raise" or "silent".
            on_failure: Asked what is wrong when a capture fails.
            reasons: Told why calls run without a graph.
        """
        self._name = name
        self._reasons = CallReasons() if reasons is None else reasons
        self._fn = fn
        self._stats = stats
        self._on_skip = on_skip
        self._level = logging.WARNING if on_skip == "warn" else logging.INFO
        self._on_failure = on_failure
        self.failure: str | None = None
        """Why it is captured no more."""
        self._code = "capture"
        """Of that reason."""
        self._failed_once = False
        self._refusal: CaptureError | None = None
        self._said_transform = self._said_memory = False

    def raise_refusal(self) -> None:
        """Raise what a capture failed with before: a call does not try again what can't succeed.

        Raises:
            CaptureError: If `on_skip` is "raise" and it did.
        """
        if self._refusal is not None:
            raise CaptureError(str(self._refusal))

    @property
    def checks_warm_ups(self) -> bool:
        """Whether to look out for what waits for the device before anything is captured."""
        return self._on_failure is not None and self._on_failure.checks_warm_ups

    def is_to_blame(self, args: Sequence[Any], error: Exception | None) -> bool:
        """Find out whether the partition can't be captured; then it runs plainly, and its recordings are of no more use.

        Args:
            args: Inputs of a call.
            error: What its capture raised; None if the sync check found something in a warm-up.

        Raises:
            Exception: `error` itself, where it is the user's own.
            CaptureError: If `on_skip` is "raise".
        """
        if self._on_failure is None:
            return False
        try:
            outcome = self._on_failure(list(args), error)
        except CaptureError as refusal:
            self._refuse(refusal)
            raise
        if outcome is None:
            return False
        self.failure, self._code = outcome.why, "capture"
        if outcome.again:
            log.log(
                self._level,
                "%s can't be captured as a whole; the next call compiles the function again, to capture all but this: %s",
                self._name,
                outcome.why,
            )
        else:
            self._say_it_runs_plainly(self.failure, self._advice())
        return True

    def note_failure(self) -> bool:
        """Note that a call runs without a graph since the partition is captured no more; returns whether it is so."""
        failure = self.failure
        if failure is None:
            return False
        self._reasons.note(self._code, lambda: (failure, None))
        return True

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Run the callable itself."""
        outputs = self._fn(args)
        self._stats.plain_calls += 1
        return outputs

    def no_memory(self, error: Exception) -> str:
        """Say that a capture found no memory; returns why such calls run without a graph.

        Raises:
            CaptureError: If `on_skip` is "raise".
        """
        why = _text_of(error)
        if self._on_skip == "raise":
            refusal = CaptureError(self._message(why, self._advice(error)))
            self._refuse(refusal)
            raise refusal
        if not self._said_memory:
            self._said_memory = True
            log.log(
                self._level,
                "%s: there is no memory to record calls like this one, which run without a graph from now on: %s. %s",
                self._name,
                why,
                _MORE_MEMORY,
            )
        return why

    def run_bypassed(self, args: list[Any], why: str) -> Sequence[Any]:
        """Run a call without a graph, whatever it is. Args: why: see `Owner.bypassed`; a transform is said once."""
        if why in _BYPASSED:
            self._reasons.note(why, lambda: (_BYPASSED[why], None))
        if why == "transform" and not self._said_transform:
            self._said_transform = True
            log.log(
                self._level,
                "%s runs without a graph inside of transforms (torch.func, vmap, batched gradients): call it outside of "
                "them to have it replayed.",
                self._name,
            )
        return self.run(args)

    def run_again(self, args: list[Any], error: Exception) -> Sequence[Any]:
        """Make a call whose capture failed without it, and try none like it again unless the error was the user's.

        Raises:
            CaptureError: If `on_skip` is "raise".
        """
        passing = not (
            self._failed_once
            or isinstance(error, torch.OutOfMemoryError | StagingError)
            or is_capture_error(error)
        )
        if self._on_skip == "raise" and not passing:
            refusal = CaptureError(self._message(_text_of(error), self._advice(error)))
            self._refuse(refusal)
            raise refusal from error
        outputs = self.run(args)  # if this raises, the error is the user's own
        self._failed_once = True
        if not passing:
            self.failure, self._code = _text_of(error), _code_of(error)
            self.note_failure()
            self._say_it_runs_plainly(self.failure, self._advice(error))
        return outputs

    def forget(self) -> None:
        """Forget what failed, for captures to be tried again."""
        failed = self.failure is not None or self._refusal is not None
        if failed and self._on_failure is not None:
            self._on_failure.forget()
        self.failure = self._refusal = None
        self._failed_once = self._said_memory = False

    def _refuse(self, refusal: CaptureError) -> None:
        if self._on_skip == "raise":
            self._refusal = CaptureError(
                str(refusal)
            )  # without the frames that hold the call's inputs

    def _message(self, why: str, advice: str) -> str:
        refuses = self._on_skip == "raise"
        then = (
            'on_skip="raise" refuses its calls' if refuses else "runs without a graph from now on"
        )
        text = f"{self._name} can't be captured and {then}: {why}"
        return f"{text.rstrip('.')}. {advice}"

    def _advice(self, error: Exception | None = None) -> str:
        """What the user can do about it."""
        if isinstance(error, torch.OutOfMemoryError):
            return _MORE_MEMORY
        if isinstance(error, StagingError):
            return _OTHER_INPUT
        return _NO_SYNCS if self._on_failure is None else _NAME_IT

    def _say_it_runs_plainly(self, why: str, advice: str) -> None:
        log.log(self._level, "%s", self._message(why, advice))


def _code_of(error: Exception) -> str:
    """The code of the reason that a capture failed for."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory"
    return "no_placeholder" if isinstance(error, StagingError) else "capture"


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
