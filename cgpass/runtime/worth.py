"""`Worth`: whether a captured partition is any faster than it is plainly.

Note [What a capture is worth]
    A replay saves the host most of what a plain call takes it, and costs the device copies of the inputs that move. What
    the host saves is known once the partition is recorded: while it was, nothing ran but the host. Where copies take
    clearly less, it is captured, and where they take clearly more, it is not. What other partitions read of its outputs
    counts against leaving it plain: they would have to copy that.

    Where it is close (always with `capture_policy="measured"`) a few calls decide: plain ones, made for this alone
    before the first replay, and the first replays, each with the device waited for. Either is decided once. A partition
    that is left plain stays so until `cgpass.reset()`.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from cgpass import _torch
from cgpass.runtime.driver import BoxedCallable
from cgpass.runtime.failures import random_state_kept
from cgpass.runtime.owner import Owner
from cgpass.runtime.recording import Recording

log = logging.getLogger(__name__)

_LAUNCH_US: Final = 15.0
"""Host time of a replay: launching the graph, and filling placeholders."""
_CLEARLY: Final = 2.0
"""How many times as much is clearly more."""
_CALLS: Final = 5
"""Calls that are timed, plainly and replayed; the first of each does not count."""


class Candidate(Protocol):
    """A partition that is recorded."""

    fn: BoxedCallable
    """What it runs."""
    owner: Owner

    def leave_plain(self, why: str) -> None:
        """Run plainly from now on, for a reason."""
        ...


class Worth(Protocol):
    """Judges the recordings of one partition."""

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """Whether to keep a recording that was just made and not replayed yet; else the partition runs plainly.

        Args:
            part: The partition.
            recording: Of a call's signature.
            args: That call's inputs.
        """
        ...


class Always:
    """`capture_policy="always"`."""

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """True."""
        del part, recording, args
        return True


class Judge:
    """`capture_policy="auto"` and `"measured"`. See Note [What a capture is worth]."""

    def __init__(self, *, measures: bool) -> None:
        """Args: measures: whether to time where copies alone would decide, too."""
        self._measures = measures
        self._is_decided = False

    def is_given(self, part: Candidate, recording: Recording, args: Sequence[Any]) -> bool:
        """See `Worth`. Decides with the first recording; with one where it is close that one's replays do."""
        if self._is_decided:
            return True
        self._is_decided = True
        device = part.owner.driver.device
        bytes_per_us = _torch.memory_bandwidth(device) / 2e6  # read and written
        cost = recording.copied_bytes / bytes_per_us
        handed_on = recording.bytes_read() / bytes_per_us
        saved = max(recording.run_us - _LAUNCH_US, 0.0)
        gain = saved + handed_on
        is_close = gain < _CLEARLY * cost and cost < _CLEARLY * gain
        if (self._measures or is_close) and not recording.written:
            Trial(part, recording, _time_plainly(part.fn, args, device) + handed_on)
            return True
        if cost < max(_CLEARLY * gain, _LAUNCH_US):  # nobody notices less
            return True
        part.leave_plain(
            f"copying {recording.copied_bytes >> 20} MiB of inputs into its graph would take the device about "
            f"{cost:.0f} us a call, and the graph would save the host {saved:.0f} us"
        )
        return False


class Trial:
    """Times the first replays of a recording."""

    def __init__(self, part: Candidate, recording: Recording, plain_us: float) -> None:
        """Have the recording's next replays timed.

        Args:
            part: The partition.
            recording: Not replayed yet.
            plain_us: What a plain call takes, and what others pay for it.
        """
        self._part = part
        self._recording = recording
        self._plain_us = plain_us
        self._times: list[float] = []
        recording.run = self._run  # type: ignore[method-assign]

    def _run(self, args: Sequence[Any]) -> list[Any]:
        device = self._part.owner.driver.device
        outputs, took = _timed(lambda: Recording.run(self._recording, args), device)
        self._times.append(took)
        if len(self._times) == _CALLS:
            del self._recording.run  # the class's own again
            self._decide()
        return outputs

    def _decide(self) -> None:
        replay_us = statistics.median(self._times[1:])
        log.debug("plain calls take %.0f us, replays %.0f us", self._plain_us, replay_us)
        if replay_us > self._plain_us:
            self._recording.retire()
            self._part.leave_plain(
                f"a replay takes {replay_us:.0f} us and a plain call {self._plain_us:.0f} us, as measured in its first "
                "calls"
            )


def _time_plainly(fn: BoxedCallable, args: Sequence[Any], device: torch.device) -> float:
    times = []
    with random_state_kept(device, args):
        for _ in range(_CALLS):
            times.append(_timed(lambda: fn(list(args)), device)[1])
    return statistics.median(times[1:])


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a call returns, and microseconds until the device is done with it."""
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return result, (time.perf_counter() - start) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def worth(policy: str) -> Worth:
    """What judges by a policy, as `cgpass.Options.capture_policy` has it."""
    return Always() if policy == "always" else Judge(measures=policy == "measured")
